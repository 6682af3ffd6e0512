//! Agreement of the ranks before a launch: on the calls themselves ([`launch_log`]), and on which
//! tensors peers may access directly ([`zero_copy`]).

pub mod copy_mode;
pub mod launch_log;
pub mod zero_copy;
