//! The text of every kernel in `src/kernels/cuda`. The build finds new files there; they need not
//! be named here.

/// A file of `src/kernels/cuda/include`, which programs include by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The name in `#include`, such as `device.cuh`.
    pub name: &'static str,
    /// The source text.
    pub text: &'static str,
}

/// A file `src/kernels/cuda/*/*.cu`, which is compiled as one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Folder and file without the ending, such as `reduce/low_latency`.
    pub name: &'static str,
    /// The source text.
    pub text: &'static str,
}

// `HEADERS` and `PROGRAMS`, each in the order of the names.
include!(concat!(env!("OUT_DIR"), "/table.rs"));
