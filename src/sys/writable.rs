//! Tests whether memory is writable without changing it.
#![allow(unsafe_code, reason = "a system call that has no safe form")]

use std::sync::atomic::AtomicU32;

/// Returns true if the first and the last byte of `bytes` bytes at `address` are writable: not in a
/// read-only mapping of a file, nor behind the end of a truncated file. Also true if the system
/// does not say.
pub fn is_writable(address: usize, bytes: usize) -> bool {
    let last = address.saturating_add(bytes.saturating_sub(1));
    bytes == 0
        || (takes_a_word(address)
            && (address / SMALLEST_PAGE == last / SMALLEST_PAGE || takes_a_word(last)))
}

/// The page size of every supported machine is a multiple of this.
const SMALLEST_PAGE: usize = 4096;

/// Makes Linux add 0 atomically to the word around `address`. This fails where a store would raise
/// SIGSEGV or SIGBUS, and does not lose another thread's store.
fn takes_a_word(address: usize) -> bool {
    const ADD_NOTHING: i32 = libc::FUTEX_OP_ADD << 28;
    let own = AtomicU32::new(0);
    // SAFETY: FUTEX_WAKE_OP wakes no thread, because none sleeps at `own` or at a word of a tensor;
    // it leaves the word at `address` unchanged, and a bad address is an error.
    let status = unsafe {
        libc::syscall(
            libc::SYS_futex,
            own.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            std::ptr::null::<libc::timespec>(),
            address & !3,
            ADD_NOTHING,
        )
    };
    status >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    #[test]
    fn each_end_is_asked_and_kept() {
        const PAGE: usize = 64 << 10;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, access, MapFlags::PRIVATE) }
                .expect("mapped");
        // SAFETY: within the mapping, which only this test uses.
        unsafe {
            base.byte_add(PAGE - 8).cast::<u64>().write(u64::MAX);
            mprotect(base.byte_add(PAGE), PAGE, MprotectFlags::READ).expect("read-only");
        }
        let at = base as usize;
        assert!(is_writable(at, 1) && is_writable(at + PAGE - 3, 3) && is_writable(at, 0));
        assert!(
            !is_writable(at + PAGE - 8, 9)
                && !is_writable(at + PAGE, 4)
                && !is_writable(at + 2 * PAGE - 1, 1)
        );
        assert!(is_writable(at + 2 * PAGE, PAGE) && !is_writable(8, 1));
        // SAFETY: as above.
        unsafe {
            assert_eq!(base.byte_add(PAGE - 8).cast::<u64>().read(), u64::MAX);
            munmap(base, 3 * PAGE).expect("unmapped");
        }
    }
}
