//! What a rank reads while it joins: records in the store, and both messages over rank 0's socket.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::boot::heard;

fuzz_target!(|data: &[u8]| {
    heard::record(data);
    heard::hello(data);
    heard::answer(data);
});
