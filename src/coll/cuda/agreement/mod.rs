//! Agreement of the ranks before a launch: they compare the calls themselves ([`launch_log`]), and which tensors peers may reach
//! ([`zero_copy`]).

pub mod launch_log;
pub mod zero_copy;
