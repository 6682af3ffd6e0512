//! How a failure of the group reaches its kernels ([`abort_flag`]) and how one that a kernel saw reaches the group ([`report`]).

pub mod abort_flag;
pub mod report;
