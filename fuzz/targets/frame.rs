//! Frames that a server and a client read from a socket: no bytes may make them panic or allocate
//! more than a small multiple of the frame, and an accepted frame must keep its meaning when it is
//! encoded and decoded again.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use symm::store::table::KeyTable;
use symm::store::tcp::frame::{ClientFrame, LENGTH, ServerFrame};

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = ClientFrame::decode(data) {
        let mut frame = Vec::new();
        if message.encode(&mut frame).is_ok() {
            assert_eq!(ClientFrame::decode(&frame[LENGTH..]).as_ref(), Ok(&message));
        }
        if let ClientFrame::Call(_, request) = &message {
            let _ = KeyTable::bounded(1 << 16).serve(request, None);
        }
    }
    if let Ok(answer) = ServerFrame::decode(&Bytes::copy_from_slice(data)) {
        let frame = Bytes::from(answer.encode().concat());
        // Not compared, because decoding replaces text that is not UTF-8.
        let _ = ServerFrame::decode(&frame.slice(LENGTH..)).expect("an answer that was accepted");
    }
});
