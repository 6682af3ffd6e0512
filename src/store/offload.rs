//! Adds timeouts to another library's store: a thread executes the blocking calls, and callers
//! abandon late ones.

use super::Store;
use super::request::Request;
use super::table::TableReply;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::interrupt;
use crate::sys::thread;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a caller waits beyond the limit of its operation, so that the operation can still
/// report the missing keys.
const OFFLOADED_GRACE: Duration = Duration::from_millis(150);

/// An operation that a caller has queued for the thread.
struct StoreJob {
    request: Vec<u8>,
    limit: Duration,
    give_up: Instant,
    /// Receives the outcome; `None` if the time was over before the operation started.
    answer: Sender<Option<Result<TableReply>>>,
}

/// A store that executes one operation at a time and answers each within its limit, even if `store`
/// does not.
///
/// An abandoned operation occupies the thread, and the thread keeps the store, until the store
/// answers; the operation may still take effect then. Operations queued behind it are not started
/// once their own time is over.
pub struct OffloadedStore {
    name: String,
    jobs: Option<Mutex<Sender<StoreJob>>>,
    given_up: AtomicUsize,
    thread: Option<JoinHandle<()>>,
}

impl OffloadedStore {
    /// Makes a worker for `store`; errors name the store `name`.
    pub fn new(store: Arc<dyn Store>, name: String) -> Result<Self> {
        let (jobs, queue) = channel();
        let thread = thread::spawn("symm-store-call", None, move || run(&*store, &queue))?;
        Ok(Self {
            name,
            jobs: Some(Mutex::new(jobs)),
            given_up: AtomicUsize::new(0),
            thread: Some(thread),
        })
    }

    /// Counts an abandoned operation, which the thread still executes or may execute, and returns
    /// its error.
    fn given_up(&self, request: &Request<'_>, limit: Duration) -> Error {
        self.given_up.fetch_add(1, Ordering::Relaxed);
        self.late(request, limit)
    }

    fn late(&self, request: &Request<'_>, limit: Duration) -> Error {
        Error::timeout(format!(
            "{} did not answer {:?} within {} ms (timeout): its process is stopped or overloaded",
            self.name,
            request.op,
            limit.as_millis()
        ))
    }
}

fn run(store: &dyn Store, queue: &Receiver<StoreJob>) {
    for StoreJob { request, limit, give_up, answer } in queue {
        let left = give_up.saturating_duration_since(Instant::now());
        let begun = !left.is_zero();
        let done = begun.then(|| {
            Request::decode(&request)
                .and_then(|request| store.call(&request, Some(limit.min(left))))
        });
        // The caller may have stopped waiting.
        let _ = answer.send(done);
    }
}

impl Store for OffloadedStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let limit = limit.unwrap_or(super::DEFAULT_TIMEOUT).min(super::MAX_TIMEOUT);
        let give_up = Instant::now() + limit + OFFLOADED_GRACE;
        let gone = || Error::internal(format!("the thread for calls of {} has ended", self.name));
        let (answer, done) = channel();
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let job = StoreJob { request: bytes, limit, give_up, answer };
        let jobs = self.jobs.as_ref().ok_or_else(gone)?;
        lock(jobs).send(job).map_err(|_| gone())?;
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            match done.recv_timeout(left.min(interrupt::SIGNAL_POLL)) {
                Ok(Some(outcome)) => return outcome,
                // This process was stopped meanwhile, or an earlier operation took all the time.
                Ok(None) => return Err(self.late(request, limit)),
                Err(RecvTimeoutError::Timeout) if left > interrupt::SIGNAL_POLL => {
                    interrupt::check().inspect_err(|_| {
                        self.given_up.fetch_add(1, Ordering::Relaxed);
                    })?;
                }
                Err(RecvTimeoutError::Timeout) => return Err(self.given_up(request, limit)),
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
            }
        }
    }
}

impl Drop for OffloadedStore {
    fn drop(&mut self) {
        drop(self.jobs.take());
        // After an abandoned operation, the thread may run for an unknown time, so it is joined
        // only if it has ended.
        if let Some(thread) = self.thread.take()
            && (self.given_up.load(Ordering::Relaxed) == 0 || thread.is_finished())
        {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::store::memory::MemoryStore;
    use crate::store::request::StoreOp;
    use std::sync::mpsc;

    /// A store that blocks in `Add` until it is released, whatever the limit.
    struct Stopped {
        inner: MemoryStore,
        release: Mutex<mpsc::Receiver<()>>,
        gone: mpsc::Sender<()>,
    }

    impl Store for Stopped {
        fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
            if request.op == StoreOp::Add {
                let _ = lock(&self.release).recv();
            }
            self.inner.call(request, limit)
        }
    }

    impl Drop for Stopped {
        fn drop(&mut self) {
            let _ = self.gone.send(());
        }
    }

    #[test]
    fn what_the_store_answers_comes_through() {
        let worker =
            OffloadedStore::new(Arc::new(MemoryStore::new()), "a store".into()).expect("starts");
        worker.set("a", b"1").expect("set");
        assert_eq!(worker.get("a", None).expect("there"), "1");
        let error =
            worker.wait(&["b"], Some(Duration::from_millis(20))).expect_err("nobody sets it");
        error.assert_says(ErrorKind::Timeout, &["\"b\""]);
    }

    #[test]
    fn an_operation_whose_time_is_over_is_not_begun_and_answered_all_the_same() {
        let (store, (jobs, queue), (answer, done)) = (MemoryStore::new(), channel(), channel());
        let mut request = Vec::new();
        Request::new(StoreOp::Set, vec!["k"], vec![b"v"]).encode(&mut request);
        for give_up in [Instant::now(), Instant::now() + Duration::from_secs(5)] {
            jobs.send(StoreJob {
                request: request.clone(),
                limit: Duration::from_secs(1),
                give_up,
                answer: answer.clone(),
            })
            .expect("open");
        }
        drop(jobs);
        run(&store, &queue);
        assert!(done.recv().expect("answered").is_none(), "the first is late");
        assert!(
            done.recv().expect("answered").is_some_and(|outcome| outcome.is_ok()),
            "the second is not"
        );
    }

    #[test]
    fn a_store_that_does_not_answer_is_given_up_and_let_go_when_it_does() {
        let ((release, released), (gone, is_gone)) = (mpsc::channel(), mpsc::channel());
        let worker = OffloadedStore::new(
            Arc::new(Stopped { inner: MemoryStore::new(), release: Mutex::new(released), gone }),
            "the store".into(),
        );
        let worker = worker.expect("starts");
        let started = Instant::now();
        let call = |op, values| {
            worker.call(&Request::new(op, vec!["k"], values), Some(Duration::from_millis(50)))
        };
        let error = call(StoreOp::Add, vec![]).expect_err("it blocks");
        assert_eq!(
            error.message,
            "the store did not answer Add within 50 ms (timeout): its process is \
             stopped or overloaded"
        );
        // This request waits behind the first one.
        assert_eq!(call(StoreOp::Set, vec![b"v"]).expect_err("it blocks").kind, ErrorKind::Timeout);
        drop(worker);
        assert!(
            started.elapsed() < Duration::from_secs(5) && is_gone.try_recv().is_err(),
            "the store lives while it is in use"
        );
        drop(release);
        is_gone
            .recv_timeout(Duration::from_secs(10))
            .expect("let go by the thread that was left behind");
    }
}
