//! CUDA kernels run by the emulator: the C++ compiler compiles each kernel source, and host threads
//! run it.
//!
//! One test program, so that every test shares the kernels that are already compiled
//! (`program::Program`).
#![allow(missing_docs, clippy::unwrap_used)]

/// Tests that call one function with different arguments: `name: call`.
macro_rules! tests {
    ($($name:ident: $call:expr,)*) => {
        $(
            #[test]
            fn $name() {
                $call;
            }
        )*
    };
}

mod calls;
mod guarded;
mod heap;
mod host;
mod program;

mod arrival;
mod collectives;
mod copy_engine;
mod cube_mesh;
mod late_ranks;
mod messages;
mod norms;
mod programs;
mod reduce_units;
mod self_test;
mod signals;
mod sum_partials;
mod sum_parts;
mod zero_copy;
