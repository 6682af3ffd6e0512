//! Random programs of several clients of a store.

use crate::file::contents_of;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::time::Duration;
use symm::error::ErrorKind;
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::store::request::{Request, StoreOp};
use symm::store::table::TableReply;

const KEYS: [&str; 4] = ["", "a", "b", "schlüssel/1"];

/// The client of a step, its operation, and random values for its arguments.
type Step = (usize, StoreOp, Vec<u8>, Vec<u8>, i64);

/// Any step.
fn step() -> impl Strategy<Value = Step> {
    let op = prop::sample::select(StoreOp::ALL);
    (
        0..3usize,
        op,
        prop::collection::vec(0..4u8, 0..4),
        prop::collection::vec(any::<u8>(), 0..4),
        -3..100i64,
    )
}

/// Runs the request of a step. There are few keys and values, so the steps of a program often use
/// the same ones. A call waits for its keys up to `limit`.
fn perform(
    store: &dyn Store,
    (_, op, names, bytes, amount): &Step,
    limit: Duration,
) -> Result<TableReply, ErrorKind> {
    const VALUES: [&[u8]; 5] = [b"", b"1", b"-20", b"x\0y", &[7; 5000]];
    let many = matches!(op, StoreOp::Check | StoreOp::Wait | StoreOp::MultiGet | StoreOp::MultiSet);
    let none = matches!(op, StoreOp::NumKeys | StoreOp::ListKeys);
    let keys: Vec<&str> = match (many, none) {
        (true, _) => names.iter().map(|&name| KEYS[name as usize]).collect(),
        (false, true) => vec![],
        (false, false) => vec![KEYS[names.first().map_or(0, |&name| name as usize)]],
    };
    let count = if *op == StoreOp::CompareSet {
        2
    } else if matches!(op, StoreOp::Set | StoreOp::Append | StoreOp::Push | StoreOp::MultiSet) {
        keys.len()
    } else {
        0
    };
    let value =
        |index: usize| VALUES[bytes.get(index).map_or(index, |&byte| byte as usize) % VALUES.len()];
    let request =
        Request { amount: *amount, ..Request::new(*op, keys, (0..count).map(value).collect()) };
    let mut reply = store.call(&request, Some(limit)).map_err(|error| error.kind);
    if let Ok(TableReply::Keys(keys)) = &mut reply {
        keys.sort();
    }
    reply
}

/// Runs random programs on three users of a store, which must answer like one store in memory. A
/// user that opens the store later must do so, too. `make` returns a function that opens a user of
/// a new store.
pub(crate) fn answer_as_one_store<S: Store, U: Fn() -> S>(cases: u32, make: impl Fn() -> U) {
    let programs = prop::collection::vec(step(), 0..60);
    let test = |program: Vec<Step>| {
        let (user, model) = (make(), MemoryStore::new());
        let users = [(); 3].map(|()| user());
        for step in &program {
            let expected = perform(&model, step, Duration::ZERO);
            // Only a call that waits in vain has no time, because a busy server may answer late.
            let vain = matches!(expected, Err(ErrorKind::Timeout));
            let limit = if vain { Duration::ZERO } else { Duration::from_secs(60) };
            prop_assert_eq!(perform(&users[step.0], step, limit), expected, "{:?}", step);
        }
        prop_assert_eq!(contents_of(&user()), contents_of(&model));
        Ok(())
    };
    TestRunner::new(ProptestConfig::with_cases(cases)).run(&programs, test).unwrap();
}
