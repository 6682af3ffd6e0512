//! Calls end within 100 ms of a deadline, a rejection or an abort. Each test runs two ranks several
//! times, and compares the median with this limit.

use crate::alone;
use crate::threads::{barrier, span, with_ranks};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::dtype::DType;
use symm::error::{Error, ErrorKind};
use symm::group::Group;
use symm::rank::Rank;

const RUNS: usize = 11;
/// A wait longer than this counts as endless.
const PATIENCE: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_millis(100);
const TIMEOUT: Duration = Duration::from_millis(60);
/// A timeout that no call reaches.
const LONG: Duration = Duration::from_secs(20);

/// A receive from rank 1, which sends nothing.
fn receive(group: &Group, timeout: Duration) -> Result<(), Error> {
    let mut room = [0u8; 8];
    let spec = MessageSpec {
        peer: Some(Rank(1)),
        tag: 1,
        dtype: DType::U8,
        span: span(&mut room),
        timeout: Some(timeout),
    };
    // SAFETY: `room` outlives the wait for the message.
    let message = unsafe { Message::new(spec) };
    let received: &'static Mutex<_> = Box::leak(Box::new(Mutex::new(Ok(()))));
    let ticket = group.recv(
        message,
        Completion::new(move |outcome, _| *received.lock().expect("not poisoned") = outcome),
    )?;
    group.wait(ticket, None)?;
    received.lock().expect("not poisoned").clone()
}

/// Rank 0 waits in `call`, which must fail with `kind`, never before `limit` and in the median at
/// most `SOON` after it. Rank 1 meanwhile runs `other`, which returns the time from which the wait
/// is measured; `None` if that is the start of the wait.
fn ends(
    call: impl Fn(&Group) -> Result<(), Error> + Sync,
    kind: ErrorKind,
    limit: Duration,
    other: impl Fn(&Group) -> Option<Instant> + Sync,
) {
    let _alone = alone();
    let late = Mutex::new(Vec::new());
    for _ in 0..RUNS {
        let began = Mutex::new(None);
        let (ended, over) = channel();
        let (ended, over) = (Mutex::new(Some(ended)), Mutex::new(over));
        with_ranks(2, |group, rank| {
            barrier(group, Some(LONG)).expect("both are here");
            if rank == 1 {
                *began.lock().expect("not poisoned") = other(group);
                // After `PATIENCE` the abort ends an endless wait, with an error of another kind.
                if over.lock().expect("not poisoned").recv_timeout(PATIENCE)
                    == Err(RecvTimeoutError::Timeout)
                {
                    group.abort();
                }
                return;
            }
            let _ended: Option<Sender<()>> = ended.lock().expect("not poisoned").take();
            let since = Instant::now();
            let error = call(group).expect_err("it cannot succeed");
            let now = Instant::now();
            assert_eq!(error.kind, kind, "{error}");
            let began = began.lock().expect("not poisoned").unwrap_or(since).max(since);
            assert!(now - began + Duration::from_millis(1) >= limit, "too early: {error}");
            late.lock().expect("not poisoned").push((now - began).saturating_sub(limit));
        });
    }
    let mut late = late.into_inner().expect("not poisoned");
    late.sort();
    assert!(late[RUNS / 2] < SOON, "{late:?} late");
}

fn nothing(_: &Group) -> Option<Instant> {
    None
}

#[test]
fn p1_a_collective_ends_at_its_deadline() {
    ends(|group| barrier(group, Some(TIMEOUT)), ErrorKind::Timeout, TIMEOUT, nothing);
}

#[test]
fn p1_a_message_ends_at_its_deadline() {
    ends(|group| receive(group, TIMEOUT), ErrorKind::Timeout, TIMEOUT, nothing);
}

#[test]
fn p9_a_refused_collective_is_told() {
    let refuse = |group: &Group| {
        group.reject("a bad argument".into());
        Some(Instant::now())
    };
    ends(|group| barrier(group, Some(LONG)), ErrorKind::Mismatch, Duration::ZERO, refuse);
}

#[test]
fn p9_a_refused_message_is_told() {
    let refuse = |group: &Group| {
        group.reject_message(true, Some(Rank(0)), 1, "a bad argument".into());
        Some(Instant::now())
    };
    ends(|group| receive(group, LONG), ErrorKind::Mismatch, Duration::ZERO, refuse);
}

#[test]
fn p10_an_abort_releases_who_waits() {
    let abort = |group: &Group| {
        sleep(Duration::from_millis(10));
        let since = Instant::now();
        group.abort();
        Some(since)
    };
    ends(|group| barrier(group, Some(LONG)), ErrorKind::Peer, Duration::ZERO, abort);
    ends(|group| receive(group, LONG), ErrorKind::Peer, Duration::ZERO, abort);
}
