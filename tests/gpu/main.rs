//! CUDA kernels with their compiler and on a GPU. Skipped unless `SYMM_NVRTC_PATH` names NVRTC, as
//! in `make test-kernels`; tests that run a kernel need a GPU.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

#[allow(dead_code, reason = "the emulated tests use the rest")]
#[path = "../emulated/calls.rs"]
mod calls;
#[path = "../process/mod.rs"]
mod process;

mod collectives;
mod compile;
mod signals;

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use symm::kernels::cuda::driver::Device;
use symm::kernels::cuda::nvrtc::nvrtc;

/// Runs `test` on the first GPU, one test at a time: kernels that wait for each other need the
/// whole GPU. It reports a GPU that cannot be opened as a skipped test.
fn on_a_gpu(test: impl FnOnce(&Device)) {
    static GPU: Mutex<()> = Mutex::new(());
    let _alone = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    match nvrtc().and_then(|_| Device::open(0)) {
        Ok(device) => {
            let _entered = device.enter().unwrap();
            test(&device);
        }
        Err(error) => drop(writeln!(std::io::stderr(), "skipped: {error}")),
    }
}
