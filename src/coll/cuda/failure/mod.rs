//! Failures that cross between a group and its kernels: [`abort_flag`] makes kernels end when the
//! group fails, [`report`] brings a kernel's failure to the group.

pub mod abort_flag;
pub mod report;
