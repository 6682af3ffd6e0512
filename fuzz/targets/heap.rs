//! What a peer says over the link between two heaps, descriptors and all.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::symm_mem::fuzz;

fuzz_target!(|data: &[u8]| fuzz::messages(data));
