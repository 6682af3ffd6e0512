//! Random programs of several clients of a store.

use proptest::prelude::*;
use std::time::Duration;
use symm::error::ErrorKind;
use symm::store::Store;
use symm::store::request::{Request, StoreOp};
use symm::store::table::TableReply;

pub(crate) const KEYS: [&str; 4] = ["", "a", "b", "schlüssel/1"];

/// The client of a step, and its operation.
pub(crate) type Step = (usize, StoreOp, Vec<u8>, Vec<u8>, i64);

/// Any step.
pub(crate) fn step() -> impl Strategy<Value = Step> {
    let op = prop::sample::select(StoreOp::ALL);
    (
        0..3usize,
        op,
        prop::collection::vec(0..4u8, 0..4),
        prop::collection::vec(any::<u8>(), 0..4),
        -3..100i64,
    )
}

/// Runs the request of a step: there are few keys and values, so programs meet the same ones again
/// and again.
pub(crate) fn perform(
    store: &dyn Store,
    (_, op, names, bytes, amount): &Step,
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
    let mut reply = store.call(&request, Some(Duration::ZERO)).map_err(|error| error.kind);
    if let Ok(TableReply::Keys(keys)) = &mut reply {
        keys.sort();
    }
    reply
}
