//! Common parts of targets in which the input plays a peer of a group.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use symm::control::{ControlBlock, Identity};
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;

pub const CANARY: u8 = 0xA5;
pub const ME: Rank = Rank(0);
pub const PEER: Rank = Rank(1);

static FILE: OnceLock<OwnedFd> = OnceLock::new();

/// Makes the control block of `ME` in a group with `PEER`, in memory that still has the bytes of
/// the previous input.
pub fn control() -> ControlBlock {
    let bytes = SegmentLayout::new(2).total_bytes();
    let file =
        FILE.get_or_init(|| ShmSegment::create(bytes).expect("a file")).try_clone().expect("dup");
    let segment = ShmSegment::map(file, bytes).expect("maps");
    let members = (0..2).map(|global| Identity { pid: std::process::id(), global }).collect();
    ControlBlock::new(segment, ME, "fuzzed".into(), members, 0)
}

/// Zeroes `bytes` bytes of the control block's memory from `offset`.
pub fn blank(control: &ControlBlock, offset: usize, bytes: usize) {
    // SAFETY: within the segment (checked by `ptr`), which only this thread uses.
    unsafe { control.segment().ptr(offset, bytes).write_bytes(0, bytes) }
}
