//! Directories of the kernels' compiler, which only Python knows.

use super::ffi::Status;
use super::guarded;
use crate::dtype::{DType, ReduceOp};
use crate::kernels::cuda::nvrtc::search_in;
use cxx::{CxxString, CxxVector};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

pub(super) fn cuda_libraries(folders: &CxxVector<CxxString>) {
    guarded(|| {
        search_in(
            folders.iter().map(|folder| OsStr::from_bytes(folder.as_bytes()).into()).collect(),
        );
        Ok(())
    });
}

pub(super) fn check_reduce(dtype: i32, reduce_op: u8) -> Status {
    guarded(|| {
        let reduce_op = ReduceOp::from_torch(reduce_op)?;
        crate::kernels::cpu::supports(reduce_op, DType::combined(dtype, reduce_op)?)
    })
}
