//! One user of the file: executes its requests, and polls while they wait.

use super::backoff::Backoff;
use super::lifecycle;
use super::log::{LogEntry, Replica, check_size};
use super::log_file::{LOCK_RETRY, LogFile};
use crate::error::{Error, Result};
use crate::store::request::{Request, StoreOp};
use crate::store::table::{TableReply, TableResult};
use crate::store::{deadline, timed_out};
use crate::sys::byte_lock::Mode;
use crate::sys::fork;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum number of lock-free reads while a slot is being written; after them, a read takes the
/// lock.
const LOOKS: usize = 3;

/// Time between two checks that the file still exists, during a wait or between writes.
const FILE_CHECK: Duration = Duration::from_millis(100);

/// A buffer that has grown beyond this is freed after the request.
const KEPT: usize = 1 << 20;

struct ClientState {
    replica: Replica,
    buffer: Vec<u8>,
    /// When a write last found that the file still exists.
    found: Instant,
}

/// A user that has joined the file.
pub(super) struct FileClient {
    disk: LogFile,
    world_size: u32,
    state: Mutex<ClientState>,
    /// Fork generation of the process that opened the file.
    generation: u64,
}

/// The outcome of one attempt.
enum TryResult {
    Done(TableReply),
    /// A key is missing.
    Missing,
    /// Another process holds the lock.
    Busy,
}

impl FileClient {
    pub(super) fn join(path: &Path, world_size: u32, limit: Option<Duration>) -> Result<Self> {
        let (disk, replica) = lifecycle::join(path, world_size, limit)?;
        let found = Instant::now();
        let state = Mutex::new(ClientState { replica, buffer: Vec::new(), found });
        Ok(Self { disk, world_size, state, generation: fork::generation() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.disk.path.given
    }

    pub(super) fn call(
        &self,
        request: &Request<'_>,
        limit: Option<Duration>,
    ) -> Result<TableReply> {
        // Checked before any mutex is taken, because a thread of the parent may have held the mutex
        // when this process was forked.
        if self.generation != fork::generation() {
            let path = self.path();
            return Err(Error::config(format!(
                "the file store {path:?} was opened by the parent of this process, which \
                 must open its own"
            )));
        }
        if request.op.writes() {
            check_size(request)?;
        }
        match self.attempt(request)? {
            TryResult::Done(reply) => Ok(reply),
            TryResult::Missing | TryResult::Busy => self.wait(request, limit),
        }
    }

    fn state(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(|poisoned| {
            self.state.clear_poison();
            let mut state = poisoned.into_inner();
            state.replica.distrust();
            state
        })
    }

    /// Fails if the path no longer names the file, which later users would then not find.
    fn check_file(&self) -> Result<()> {
        if self.disk.path.holds(&self.disk.file)? {
            return Ok(());
        }
        Err(Error::config(format!(
            "the file store {:?} was removed or replaced while it was in use",
            self.path()
        )))
    }

    /// Reads the new entries of the log before a read request; `false` if that needs the lock and
    /// another process holds it.
    fn follow(&self, replica: &mut Replica) -> Result<bool> {
        if self.disk.coherent {
            for _ in 0..LOOKS {
                if replica.follow(&self.disk, false)? {
                    return Ok(true);
                }
            }
        }
        match self.disk.try_hold(Mode::Shared)? {
            Some(_held) => replica.follow(&self.disk, true),
            None => Ok(false),
        }
    }

    fn attempt(&self, request: &Request<'_>) -> Result<TryResult> {
        let mut state = self.state();
        let ClientState { replica, buffer, found } = &mut *state;
        // A read, or the first check of a request that waits and then writes; such a request takes
        // the lock only if the key exists.
        if !request.op.writes() || request.op.waits() {
            if !self.follow(replica)? {
                return Ok(TryResult::Busy);
            }
            if !request.op.writes() {
                return Ok(replica.table.serve(request, None)?.into());
            }
            if !replica.table.missing(request).is_empty() {
                return Ok(TryResult::Missing);
            }
        }
        let Some(_held) = self.disk.try_hold(Mode::Exclusive)? else {
            return Ok(TryResult::Busy);
        };
        let now = Instant::now();
        if now >= *found + FILE_CHECK {
            self.check_file()?;
            *found = now;
        }
        replica.follow(&self.disk, true)?;
        let before = value_to_keep(replica, request)?;
        let answer = replica.table.serve(request, None)?;
        if let TableResult::Done(reply) = &answer
            && changes(request, reply, before.as_ref())
        {
            replica.append(&LogEntry::Request(request), buffer, &mut |bytes, at| {
                self.disk.write(bytes, at)
            })?;
            if buffer.capacity() > KEPT {
                *buffer = Vec::new();
            }
        }
        Ok(answer.into())
    }

    /// Retries until `limit` has passed, while other threads of this process may use the store.
    fn wait(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let deadline = deadline(limit);
        let longest = Duration::from_millis(if self.disk.coherent { 1 } else { 5 });
        let (mut pauses, mut busy) = (Backoff::new(longest), Backoff::new(LOCK_RETRY));
        let mut check = Instant::now() + FILE_CHECK;
        loop {
            // The time is taken before the attempt, so an attempt past the deadline is the last
            // one.
            let now = Instant::now();
            let locked = match self.attempt(request)? {
                TryResult::Done(reply) => return Ok(reply),
                TryResult::Missing => false,
                TryResult::Busy => true,
            };
            if now >= check {
                check = now + FILE_CHECK;
                self.check_file()?;
            }
            if now < deadline {
                let pauses = if locked { &mut busy } else { &mut pauses };
                pauses.pause_or_stop(deadline)?;
                continue;
            }
            if locked {
                return Err(self.disk.locked_by_another());
            }
            let missing = self.state().replica.table.missing(request);
            if missing.is_empty() {
                // Another thread has just read the missing keys from the log.
                continue;
            }
            let error = timed_out(request, limit, &missing);
            return Err(Error {
                message: format!("{} (file store {:?})", error.message, self.path()),
                ..error
            });
        }
    }
}

impl From<TableResult> for TryResult {
    fn from(answer: TableResult) -> Self {
        match answer {
            TableResult::Done(reply) => Self::Done(reply),
            TableResult::Missing(_) => Self::Missing,
        }
    }
}

/// Returns the value before an addition of 0. Such a request only asks for the sum, so the log need
/// not grow.
fn value_to_keep(replica: &mut Replica, request: &Request<'_>) -> Result<Option<TableResult>> {
    if request.op != StoreOp::Add || request.amount != 0 {
        return Ok(None);
    }
    replica.table.serve(&Request::new(StoreOp::Get, request.keys.clone(), vec![]), None).map(Some)
}

/// Returns true if `request`, answered with `reply`, may have changed the table; `before` is from
/// [`value_to_keep`].
fn changes(request: &Request<'_>, reply: &TableReply, before: Option<&TableResult>) -> bool {
    match (request.op, reply) {
        // A compare-set that failed because the key already has the desired value counts as a
        // change, which is harmless.
        (StoreOp::CompareSet, TableReply::Value(value)) => value == request.values[1],
        (StoreOp::Delete, TableReply::Flag(existed)) => *existed,
        (StoreOp::Add, TableReply::Number(sum)) => match before {
            Some(TableResult::Done(TableReply::Value(value))) => {
                value != sum.to_string().as_bytes()
            }
            _ => true,
        },
        (op, _) => op.writes(),
    }
}

impl Drop for FileClient {
    fn drop(&mut self) {
        // The parent is the user of the file, not this forked child.
        if self.generation != fork::generation() {
            return;
        }
        let state = self.state.get_mut().unwrap_or_else(|poisoned| {
            let state = poisoned.into_inner();
            state.replica.distrust();
            state
        });
        lifecycle::leave(&self.disk, &mut state.replica, self.world_size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes two users of a file that behave as if its file system were not coherent.
    fn users(path: &Path) -> [FileClient; 2] {
        [(); 2].map(|()| {
            let mut user = FileClient::join(path, 2, None).expect("joins");
            user.disk.coherent = false;
            user
        })
    }

    #[test]
    fn where_writes_are_not_seen_at_once_looks_are_made_under_the_lock() {
        let folder = tempfile::tempdir().expect("a folder");
        let [first, second] = users(&folder.path().join("store"));
        let get = Request::new(StoreOp::Get, vec!["k"], vec![]);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| first.call(&get, None));
            std::thread::sleep(Duration::from_millis(30));
            second.call(&Request::new(StoreOp::Set, vec!["k"], vec![b"v"]), None).expect("set");
            assert_eq!(waiter.join().expect("no panic"), Ok(TableReply::Value("v".into())));
        });
        let held = second.disk.try_hold(Mode::Exclusive).expect("locks are offered");
        assert!(held.is_some());
        let error = first.call(&get, Some(Duration::from_millis(5))).expect_err("a writer has it");
        assert!(
            error.message.contains(&format!("is held by process {} (alive", std::process::id())),
            "{error}"
        );
        drop(held);
        assert_eq!(first.call(&get, None), Ok(TableReply::Value("v".into())));
    }

    #[test]
    fn a_table_that_a_panic_has_left_is_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let [first, _second] = users(&folder.path().join("store"));
        let set = Request::new(StoreOp::Set, vec!["k"], vec![b"half done"]);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut state = first.state();
            state.replica.table.serve(&set, None).expect("served");
            panic!("in the middle");
        }));
        assert!(panicked.is_err());
        assert_eq!(
            first.call(&Request::new(StoreOp::NumKeys, vec![], vec![]), None),
            Ok(TableReply::Number(0))
        );
    }
}
