//! Fuzz harness for messages that joining ranks receive: no bytes may make a reader panic, and an accepted message
//! keeps its meaning when it is encoded again.

use super::record::{Record, agree};
use super::wire::{Answer, Hello};
use crate::rank::Rank;

/// Decodes the record of rank 0 in the store and compares it with a copy of itself.
pub fn record(bytes: &[u8]) {
    let Ok(record) = Record::decode(Rank(0), bytes) else { return };
    let written = record.encode().expect("what was read can be written");
    assert_eq!(Record::decode(Rank(0), &written).as_ref(), Ok(&record));
    assert_eq!(agree("fuzzed", &[&record, &record]), Ok(()));
    if let Some(failure) = &record.failure {
        let _ = failure.error();
    }
}

/// Decodes the first message of a process that connects to rank 0.
pub fn hello(bytes: &[u8]) {
    if let Some(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
}

/// Decodes an answer of rank 0.
pub fn answer(bytes: &[u8]) {
    if let Some(answer) = Answer::decode(bytes) {
        let again = Answer::decode(&answer.encode()).expect("an answer that was accepted");
        assert_eq!(again.token, answer.token);
        assert_eq!(again.failure.map(|error| error.kind), answer.failure.map(|error| error.kind));
    }
}
