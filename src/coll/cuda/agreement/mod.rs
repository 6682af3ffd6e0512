//! Agreement of the ranks before a launch: on the calls themselves ([`launch_log`]), on the launch
//! from which calls are zero-copy ([`zero_copy`]), and on how copy engines move the bytes of
//! collectives ([`copy_mode`]) and of messages ([`message_mode`]).

pub mod copy_mode;
pub mod launch_log;
pub mod message_mode;
pub mod zero_copy;
