//! Frames that a server and a client read from a socket: no bytes may make them panic or allocate more than a small
//! multiple of the frame, and an accepted frame must keep its meaning when it is encoded and decoded again.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use symm::store::table::Table;
use symm::store::tcp::frame::{Answer, LENGTH, Message};

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = Message::decode(data) {
        let mut frame = Vec::new();
        if message.encode(&mut frame).is_ok() {
            assert_eq!(Message::decode(&frame[LENGTH..]).as_ref(), Ok(&message));
        }
        if let Message::Call(_, request) = &message {
            let _ = Table::bounded(1 << 16).serve(request, None);
        }
    }
    if let Ok(answer) = Answer::decode(&Bytes::copy_from_slice(data)) {
        let frame = Bytes::from(answer.encode().concat());
        // Not compared, because decoding replaces text that is not UTF-8.
        let _ = Answer::decode(&frame.slice(LENGTH..)).expect("an answer that was accepted");
    }
});
