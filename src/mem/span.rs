//! A piece of memory as plain values.

/// A contiguous piece of a tensor's memory: address and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte; any alignment; ignored when `bytes` is 0.
    pub addr: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// The first byte.
    pub fn ptr(self) -> *mut u8 {
        self.addr as *mut u8
    }
}
