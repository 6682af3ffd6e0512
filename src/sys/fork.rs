//! Notices `fork`, and keeps what a process owns apart from what its forked children see of it.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use rustix::fd::{AsRawFd, BorrowedFd};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Value of an entry without a descriptor.
const FREE: i32 = -1;

/// The descriptors of [`Unshared`]; a list that grows could be caught by a fork while it does.
static UNSHARED: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];

/// Most of them: as many as a hub of 128 hosts has connections, in four groups. A child looks at all, which takes a microsecond.
const SLOTS: usize = 1024;

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &UNSHARED {
        let fd = slot.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            exchange_for_nothing(fd);
        }
    }
}

/// Puts `/dev/null` in the place of `fd`, whose owner in this process can then still close it.
fn exchange_for_nothing(fd: i32) {
    // SAFETY: the path ends with a zero; `open`, `dup3` and `close` may be called in a child after fork. The number `fd`
    // is that of an open descriptor, for its `Unshared` goes before it is closed.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if null >= 0 {
            libc::dup3(null, fd, libc::O_CLOEXEC);
            libc::close(null);
        }
    }
}

/// Guard of an open file: while it lives, forked children do not get the file, which they would otherwise share with all its locks: those
/// of a parent that is killed would last until the last of them ends.
#[derive(Debug)]
pub struct Unshared {
    slot: &'static AtomicI32,
    generation: u64,
}

impl Unshared {
    /// Guards the open file `fd`, which must not be closed before this value is dropped; `None` if as many live as there are slots.
    pub fn new(fd: BorrowedFd<'_>) -> Option<Self> {
        let generation = generation();
        let take = |slot: &&AtomicI32| slot.compare_exchange(FREE, fd.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed).is_ok();
        UNSHARED.iter().find(take).map(|slot| Self { slot, generation })
    }
}

impl Drop for Unshared {
    fn drop(&mut self) {
        // In a child the slot is free, or another's.
        if self.generation == generation() {
            self.slot.store(FREE, Ordering::Relaxed);
        }
    }
}

/// A number that differs between a process and its forked children: what was made under another generation belongs to
/// the parent and must not be used. (`exec` starts anew; a raw `clone` system call is not noticed.)
pub fn generation() -> u64 {
    // No `Once`: one that is being run during a fork would block the child for ever. Registering twice does no harm,
    // a child then counts by two.
    if !REGISTERED.load(Ordering::Acquire) {
        // SAFETY: `in_child` only adds to an atomic, which any context after fork may do, and is never unloaded while registered.
        let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if status == 0 {
            REGISTERED.store(true, Ordering::Release);
        }
    }
    GENERATION.load(Ordering::Relaxed)
}

struct Slot<T> {
    generation: u64,
    value: T,
}

/// A value of which each process has its own: a forked child gets a fresh one, whatever locks the parent held.
pub struct PerProcess<T: 'static> {
    slot: AtomicPtr<Slot<T>>,
    make: fn() -> T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// A value that `make` provides when a process first asks for it; it may be called more than once, and one result is kept.
    pub const fn new(make: fn() -> T) -> Self {
        Self { slot: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    /// Value of this process.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let current = self.slot.load(Ordering::Acquire);
            // SAFETY: a pointer in `slot` is null or came from the `Box` below, was published by the Release half of
            // the exchange, and is never freed: a child leaks its parent's, since a lock in it may be held for ever.
            if let Some(slot) = unsafe { current.as_ref() }
                && slot.generation == generation
            {
                return &slot.value;
            }
            let fresh = Box::into_raw(Box::new(Slot { generation, value: (self.make)() }));
            match self.slot.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: `fresh` is now in `slot` and therefore never freed.
                Ok(_) => return unsafe { &(*fresh).value },
                // SAFETY: `fresh` came from `Box::into_raw` above and was not published.
                Err(_) => drop(unsafe { Box::from_raw(fresh) }),
            }
        }
    }
}

/// A value of the process that made it: a forked child may look at its copy, but what ends with it there is the parent's, and stays.
#[derive(Debug)]
pub struct OfProcess<T> {
    value: ManuallyDrop<T>,
    generation: u64,
}

impl<T> OfProcess<T> {
    /// `value`, of this process.
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), generation: generation() }
    }

    /// Whether this process made it.
    pub fn is_own(&self) -> bool {
        self.generation == generation()
    }

    /// Value to be changed, by the process that made it.
    pub fn own_mut(&mut self) -> Option<&mut T> {
        self.is_own().then_some(&mut *self.value)
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: not used after `drop`, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static COUNTER: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(0));

    #[test]
    fn a_forked_child_has_another_generation_and_fresh_values() {
        let before = generation();
        // Held across the fork: the child must not see this lock.
        let mut counter = COUNTER.get().lock().expect("not poisoned");
        *counter = 7;
        // SAFETY: the child calls nothing but the code under test, which allocates (glibc repairs malloc in a child), and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fresh = COUNTER.get().try_lock().is_ok_and(|counter| *counter == 0);
            let code = i32::from(!(fresh && generation() != before));
            // SAFETY: `_exit` takes any code.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for a write; `child` is our own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(generation(), before);
        assert_eq!(*counter, 7);
    }
}
