//! The messages that a rank reads while it joins: records in the store, and both messages over rank
//! 0's socket.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::bootstrap::fuzz;

fuzz_target!(|data: &[u8]| {
    fuzz::record(data);
    fuzz::hello(data);
    fuzz::answer(data);
});
