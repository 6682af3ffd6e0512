//! Failures between a group and its kernels: [`abort_flag`] brings the group's to its kernels, [`report`] brings a kernel's to the group.

pub mod abort_flag;
pub mod report;
