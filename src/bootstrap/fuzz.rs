//! Fuzz harness for messages that joining ranks receive: no bytes may make a reader panic, and an
//! accepted message keeps its meaning when it is encoded again.

use super::handshake::{JoinHello, JoinReply};
use super::record::{JoinRecord, agree};
use crate::rank::Rank;

/// Decodes `bytes` as the record of rank 0, and checks that the record agrees with itself.
pub fn record(bytes: &[u8]) {
    let Ok(record) = JoinRecord::decode(Rank(0), bytes) else { return };
    let written = record.encode().expect("what was read can be written");
    assert_eq!(JoinRecord::decode(Rank(0), &written).as_ref(), Ok(&record));
    assert_eq!(agree("fuzzed", &[&record, &record]), Ok(()));
    if let Some(failure) = &record.failure {
        let _ = failure.error();
    }
}

/// Decodes the first message of a process that connects to rank 0.
pub fn hello(bytes: &[u8]) {
    if let Some(hello) = JoinHello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
}

/// Decodes an answer of rank 0.
pub fn answer(bytes: &[u8]) {
    if let Some(answer) = JoinReply::decode(bytes) {
        let again = JoinReply::decode(&answer.encode()).expect("an answer that was accepted");
        assert_eq!(again.token, answer.token);
        assert_eq!(again.failure.map(|error| error.kind), answer.failure.map(|error| error.kind));
    }
}
