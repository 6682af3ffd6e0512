//! Detects `fork`, and separates the resources of a process from its forked children.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::rate_limit::RateLimit;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// The values of a free slot, and of one that is being filled.
const FREE: i32 = -1;
const FILLED_SOON: i32 = -2;

/// A file descriptor that forked children do not get, and the [identity](identity) of its open
/// file. The owner may close the descriptor before it removes this entry from the list, and the
/// number may then be reused.
#[derive(Debug)]
struct GuardedFd {
    fd: AtomicI32,
    file: AtomicU64,
    /// True if no [`CloseInChild`] will remove this entry from the list.
    kept: AtomicBool,
}

/// Fixed size, because a fork could interrupt a growing list.
static UNSHARED: [GuardedFd; SLOTS] = [const {
    GuardedFd { fd: AtomicI32::new(FREE), file: AtomicU64::new(0), kept: AtomicBool::new(false) }
}; SLOTS];

/// Maximum number of listed descriptors: enough for the connections of a hub of 128 nodes in eight
/// groups with one rail each. A child checks every slot, which takes some microseconds.
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

/// Returns a number that identifies the open file of descriptor `fd`, so that a reuse of `fd` is
/// detected. Every socket has a different number.
fn identity(fd: i32) -> Option<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` may be called in a child after fork, and has filled `stat` where it returns
    // 0.
    let stat = unsafe { (libc::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    Some(stat.st_ino ^ stat.st_dev.rotate_left(40))
}

/// Replaces `fd` by `/dev/null`; its owner in this process can still close it.
fn exchange_for_nothing(fd: i32) {
    // SAFETY: the path ends with a zero; `open`, `dup3` and `close` may be called in a child after
    // fork.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if null >= 0 {
            libc::dup3(null, fd, libc::O_CLOEXEC);
            libc::close(null);
        }
    }
}

impl GuardedFd {
    /// Returns true if `fd` is still the same file.
    fn is_open(&self, fd: i32) -> bool {
        identity(fd) == Some(self.file.load(Ordering::Relaxed))
    }

    /// Takes a free slot.
    fn take() -> Option<&'static Self> {
        let free = |slot: &&Self| {
            slot.fd
                .compare_exchange(FREE, FILLED_SOON, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let found = UNSHARED.iter().find(free).or_else(|| {
            for slot in UNSHARED.iter().filter(|slot| slot.kept.load(Ordering::Relaxed)) {
                let fd = slot.fd.load(Ordering::Acquire);
                if fd >= 0 && !slot.is_open(fd) {
                    let _ =
                        slot.fd.compare_exchange(fd, FREE, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
            UNSHARED.iter().find(free)
        });
        if found.is_none() {
            LINES.warn(format_args!(
                "forked children get a connection of this process: it has more than {SLOTS}"
            ));
        }
        found
    }

    /// Fills a free slot with `fd`, whose identity is `file`.
    fn fill(fd: i32, file: u64, kept: bool) -> Option<&'static Self> {
        let slot = Self::take()?;
        slot.file.store(file, Ordering::Relaxed);
        slot.kept.store(kept, Ordering::Relaxed);
        slot.fd.store(fd, Ordering::Release);
        Some(slot)
    }
}

/// Keeps an open file out of forked children while this value lives. A child would otherwise share
/// its locks and connections, which would then outlive a killed parent.
#[derive(Debug)]
pub struct CloseInChild {
    slot: &'static GuardedFd,
    generation: u64,
}

impl CloseInChild {
    /// Guards the open file `fd`; `None` if no slot is free.
    pub fn new(fd: BorrowedFd<'_>) -> Option<Self> {
        let (generation, fd) = (generation(), fd.as_raw_fd());
        GuardedFd::fill(fd, identity(fd)?, false).map(|slot| Self { slot, generation })
    }
}

impl Drop for CloseInChild {
    fn drop(&mut self) {
        // In a child, the slot is free or belongs to another file.
        if self.generation == generation() {
            self.slot.fd.store(FREE, Ordering::Relaxed);
        }
    }
}

/// Keeps another library's socket `fd`, which may be closed at any time, out of children, both
/// forked ones and programs that are started.
pub(super) fn keep_from_children(fd: i32) {
    generation();
    let Some(file) = identity(fd) else { return };
    // SAFETY: only sets a flag of the descriptor. If it was closed meanwhile, this fails, or sets a
    // flag that is right for its successor.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    let is_listed = |slot: &GuardedFd| {
        slot.fd.load(Ordering::Acquire) == fd && slot.file.load(Ordering::Relaxed) == file
    };
    if !UNSHARED.iter().any(is_listed) {
        GuardedFd::fill(fd, file, true);
    }
}

/// Returns a number that differs between a process and its forked children. A resource that was
/// made under another generation belongs to the parent and must not be used. (`exec` starts over; a
/// raw `clone` system call is not detected.)
pub fn generation() -> u64 {
    // Not a `Once`, because one that runs during a fork would block the child forever. Registering
    // twice is harmless: a child then adds 2 instead of 1.
    if !REGISTERED.load(Ordering::Acquire) {
        // SAFETY: `in_child` uses only atomics and system calls that are allowed in a child after
        // fork, and is never unloaded while registered.
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

/// A value that each process makes for itself. A forked child gets a fresh one, regardless of locks
/// that the parent held.
pub struct PerProcess<T: 'static> {
    slot: AtomicPtr<Slot<T>>,
    make: fn() -> T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Calls `make` when a process first uses the value. `make` may run more than once; one result
    /// is kept.
    pub const fn new(make: fn() -> T) -> Self {
        Self { slot: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    /// Returns the value of this process.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let current = self.slot.load(Ordering::Acquire);
            // SAFETY: a pointer in `slot` is null or came from the `Box` below, was published by
            // the release half of the exchange, and is never freed: a child leaks its parent's
            // value, because a lock in it may be held forever.
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

/// A value that only its process drops. A forked child may read its copy, but must not drop
/// resources that belong to the parent.
#[derive(Debug)]
pub struct ProcessOwned<T> {
    value: ManuallyDrop<T>,
    generation: u64,
}

impl<T> ProcessOwned<T> {
    /// Makes a value of this process.
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), generation: generation() }
    }

    /// Returns true in the process that made the value.
    pub fn is_own(&self) -> bool {
        self.generation == generation()
    }

    /// Returns the value for changes, in the process that made it.
    pub fn own_mut(&mut self) -> Option<&mut T> {
        self.is_own().then_some(&mut *self.value)
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: not used after `drop`, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Mutex;

    static COUNTER: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(0));

    /// Runs `body` in a forked child and returns its process id. The child exits with code 0 if
    /// `body` returns true. `body` may allocate (glibc repairs malloc in a child), but must not
    /// take a lock that the parent held. The kernel ends a child that lives for two minutes, whose
    /// test waits for it in vain or has failed.
    pub(crate) fn forked(body: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child calls `body` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: sets a timer.
            unsafe { libc::alarm(120) };
            let body = std::panic::AssertUnwindSafe(body);
            let passed = std::panic::catch_unwind(body).unwrap_or(false);
            // SAFETY: `_exit` takes any code.
            unsafe { libc::_exit(i32::from(!passed)) };
        }
        child
    }

    /// Waits until `child` has ended, and returns its status.
    pub(crate) fn status_of(child: i32) -> i32 {
        let mut status = 0;
        // SAFETY: `status` is valid for a write; `child` is a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    }

    fn in_a_child(seen: impl Fn() -> bool) -> bool {
        status_of(forked(seen)) == 0
    }

    #[test]
    fn a_forked_child_has_another_generation_and_fresh_values() {
        let before = generation();
        // Held across the fork; the child must not see this lock.
        let mut counter = COUNTER.get().lock().expect("not poisoned");
        *counter = 7;
        assert!(in_a_child(|| COUNTER.get().try_lock().is_ok_and(|counter| *counter == 0)
            && generation() != before));
        assert_eq!(generation(), before);
        assert_eq!(*counter, 7);
    }

    #[test]
    fn a_number_that_was_used_again_is_left_to_children() {
        let (first, _far) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let (second, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let fd = first.as_raw_fd();
        // The second call has no effect.
        keep_from_children(fd);
        keep_from_children(fd);
        let listed =
            || UNSHARED.iter().filter(|slot| slot.fd.load(Ordering::Relaxed) == fd).count();
        assert_eq!(listed(), 1);
        assert!(in_a_child(|| first.local_addr().is_err()));
        // SAFETY: both are open and own their numbers.
        unsafe { libc::dup2(second.as_raw_fd(), fd) };
        assert!(in_a_child(|| first.local_addr().is_ok()));
        // The new owner of the number may call the function, too.
        keep_from_children(fd);
        assert!(in_a_child(|| first.local_addr().is_err()));
    }
}
