//! What the ranks of a group compare before a launch: the calls themselves ([`launch_log`]), and which tensors peers may reach ([`zero_copy`]).

pub mod launch_log;
pub mod zero_copy;
