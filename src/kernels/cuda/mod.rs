//! Kernels for CUDA devices: their sources, their compilation at run time, and their launch.

pub mod cache;
pub mod compile;
pub mod driver;
pub mod nvrtc;
pub mod source;
