//! The text of every kernel in `src/kernels/cuda`: a file that is added there is found, nothing has
//! to name it here.

/// A file of `src/kernels/cuda/include`, which programs include by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// As in `#include "device.cuh"`.
    pub name: &'static str,
    /// The source text.
    pub text: &'static str,
}

/// A file `src/kernels/cuda/*/*.cu`: what is compiled at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Folder and file without the ending, as `reduce/low_latency`.
    pub name: &'static str,
    /// The source text.
    pub text: &'static str,
}

// `HEADERS` and `PROGRAMS`, each in the order of the names.
include!(concat!(env!("OUT_DIR"), "/table.rs"));
