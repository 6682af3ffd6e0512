//! A peer's messages on the link between two heaps, including file descriptors.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::symm_mem::fuzz;

fuzz_target!(|data: &[u8]| fuzz::messages(data));
