//! What only Python knows of the CUDA kernels' surroundings.

use super::guarded;
use crate::kernels::cuda::nvrtc::search_in;
use cxx::{CxxString, CxxVector};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

pub(super) fn cuda_libraries(folders: &CxxVector<CxxString>) {
    guarded(|| {
        search_in(folders.iter().map(|folder| OsStr::from_bytes(folder.as_bytes()).into()).collect());
        Ok(())
    });
}
