//! Notices `fork`, and keeps what a process owns apart from what its forked children see of it.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::rate_limit::RateLimit;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Value of a slot without a descriptor, and of one that is being filled.
const FREE: i32 = -1;
const FILLED_SOON: i32 = -2;

/// A descriptor that forked children do not get, and [which](identity) open file it stands for: its owner may close it before it is taken
/// from the list, and the number be used again.
#[derive(Debug)]
struct Guarded {
    fd: AtomicI32,
    file: AtomicU64,
    /// No [`Unshared`] will take it from the list.
    kept: AtomicBool,
}

/// A list that grows could be caught by a fork while it does.
static UNSHARED: [Guarded; SLOTS] =
    [const { Guarded { fd: AtomicI32::new(FREE), file: AtomicU64::new(0), kept: AtomicBool::new(false) } }; SLOTS];

/// Most of them: as many as a hub of 128 hosts has connections, in eight groups with a rail each. A child looks at all, which takes some
/// microseconds.
const SLOTS: usize = 4096;

static LINES: RateLimit = RateLimit::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &UNSHARED {
        let fd = slot.fd.swap(FREE, Ordering::Relaxed);
        if fd >= 0 && slot.is_open(fd) {
            exchange_for_nothing(fd);
        }
    }
}

/// What tells the open file `fd` from others that have had the number; of sockets each has its own.
fn identity(fd: i32) -> Option<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` may be called in a child after fork, and has filled `stat` where it returns 0.
    let stat = unsafe { (libc::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    Some(stat.st_ino ^ stat.st_dev.rotate_left(40))
}

/// Puts `/dev/null` in the place of `fd`, whose owner in this process can then still close it.
fn exchange_for_nothing(fd: i32) {
    // SAFETY: the path ends with a zero; `open`, `dup3` and `close` may be called in a child after fork.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if null >= 0 {
            libc::dup3(null, fd, libc::O_CLOEXEC);
            libc::close(null);
        }
    }
}

impl Guarded {
    /// Whether `fd` still is the file that it was.
    fn is_open(&self, fd: i32) -> bool {
        identity(fd) == Some(self.file.load(Ordering::Relaxed))
    }

    /// A free slot, to be filled.
    fn take() -> Option<&'static Self> {
        let free = |slot: &&Self| slot.fd.compare_exchange(FREE, FILLED_SOON, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let found = UNSHARED.iter().find(free).or_else(|| {
            for slot in UNSHARED.iter().filter(|slot| slot.kept.load(Ordering::Relaxed)) {
                let fd = slot.fd.load(Ordering::Acquire);
                if fd >= 0 && !slot.is_open(fd) {
                    let _ = slot.fd.compare_exchange(fd, FREE, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
            UNSHARED.iter().find(free)
        });
        if found.is_none() {
            LINES.warn(format_args!("forked children get a connection of this process: it has more than {SLOTS}"));
        }
        found
    }

    /// Fills a free slot with `fd`, which is `file`.
    fn fill(fd: i32, file: u64, kept: bool) -> Option<&'static Self> {
        let slot = Self::take()?;
        slot.file.store(file, Ordering::Relaxed);
        slot.kept.store(kept, Ordering::Relaxed);
        slot.fd.store(fd, Ordering::Release);
        Some(slot)
    }
}

/// Guard of an open file: while it lives, forked children do not get the file, which they would otherwise share with all its locks and
/// connections: those of a parent that is killed would last until the last of them ends.
#[derive(Debug)]
pub struct Unshared {
    slot: &'static Guarded,
    generation: u64,
}

impl Unshared {
    /// Guards the open file `fd`; `None` if as many live as there are slots.
    pub fn new(fd: BorrowedFd<'_>) -> Option<Self> {
        let (generation, fd) = (generation(), fd.as_raw_fd());
        Guarded::fill(fd, identity(fd)?, false).map(|slot| Self { slot, generation })
    }
}

impl Drop for Unshared {
    fn drop(&mut self) {
        // In a child the slot is free, or another's.
        if self.generation == generation() {
            self.slot.fd.store(FREE, Ordering::Relaxed);
        }
    }
}

/// Keeps the socket `fd` of somebody else, who may close it at any time, from children: those that are forked, and programs that are started.
pub(super) fn keep_from_children(fd: i32) {
    generation();
    let Some(file) = identity(fd) else { return };
    // SAFETY: changes a flag of a descriptor; one that was closed meanwhile is an error, or gets what it should have.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    let is_listed = |slot: &Guarded| slot.fd.load(Ordering::Acquire) == fd && slot.file.load(Ordering::Relaxed) == file;
    if !UNSHARED.iter().any(is_listed) {
        Guarded::fill(fd, file, true);
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

    /// Whether `seen` is true in a forked child, where it may allocate (glibc repairs malloc there), but take no lock of the parent's.
    fn in_a_child(seen: impl Fn() -> bool) -> bool {
        // SAFETY: the child calls `seen` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: `_exit` takes any code.
            unsafe { libc::_exit(i32::from(!seen())) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for a write; `child` is our own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn a_forked_child_has_another_generation_and_fresh_values() {
        let before = generation();
        // Held across the fork: the child must not see this lock.
        let mut counter = COUNTER.get().lock().expect("not poisoned");
        *counter = 7;
        assert!(in_a_child(|| COUNTER.get().try_lock().is_ok_and(|counter| *counter == 0) && generation() != before));
        assert_eq!(generation(), before);
        assert_eq!(*counter, 7);
    }

    #[test]
    fn a_number_that_was_used_again_is_left_to_children() {
        let (first, _far) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let (second, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let fd = first.as_raw_fd();
        // Twice is once.
        keep_from_children(fd);
        keep_from_children(fd);
        let listed = || UNSHARED.iter().filter(|slot| slot.fd.load(Ordering::Relaxed) == fd).count();
        assert_eq!(listed(), 1);
        assert!(in_a_child(|| first.local_addr().is_err()));
        // SAFETY: both are open, and own their numbers.
        unsafe { libc::dup2(second.as_raw_fd(), fd) };
        assert!(in_a_child(|| first.local_addr().is_ok()));
        // The new owner of the number may ask for the same.
        keep_from_children(fd);
        assert!(in_a_child(|| first.local_addr().is_err()));
    }
}
