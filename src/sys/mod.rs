//! Minimal safe wrappers over features of Linux that `rustix` does not offer, or not in this form.

pub mod byte_lock;
pub mod cpu_affinity;
pub mod eintr;
pub mod epoll_fds;
pub mod fork;
pub mod interface;
pub mod interrupt;
pub mod logging;
pub mod node_id;
pub mod owner_only;
pub mod process;
pub mod process_vm;
pub mod random;
pub mod rate_limit;
pub mod required;
pub mod socket;
pub mod thread;
pub mod writable;
