//! Agreement of the ranks before a launch: on the calls themselves ([`launch_log`]), on the launch
//! from which calls are zero-copy ([`zero_copy`]), and on how copy engines move the bytes
//! ([`copy_mode`]).

pub mod copy_mode;
pub mod launch_log;
pub mod zero_copy;
