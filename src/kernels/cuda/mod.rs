//! Kernels for CUDA devices: their sources, compiled at run time, and what launches them.

pub mod cache;
pub mod compile;
pub mod driver;
pub mod nvrtc;
pub mod source;
