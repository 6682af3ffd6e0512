//! A process that is killed at its k-th observable step, without fault points in the code under
//! test. A filter of system calls (seccomp) passes each call to a thread of the same process, which
//! lets it continue or ends the process instead.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// The system calls that no other process can observe or that only wait; they are not steps.
const QUIET: [libc::c_long; 19] = [
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_sched_yield,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_geteuid,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_statx,
    libc::SYS_lseek,
];

/// As in linux/seccomp.h, which `libc` lacks: `SECCOMP_IOWR(0, struct seccomp_notif)` and
/// `SECCOMP_IOWR(1, struct seccomp_notif_resp)`.
const NOTIF_RECV: libc::Ioctl = 0xc050_2100u32 as libc::Ioctl;
const NOTIF_SEND: libc::Ioctl = 0xc018_2101u32 as libc::Ioctl;

/// Returns true if Linux supports a filter that passes system calls to a listener.
pub(crate) fn offered() -> bool {
    let mut sizes = [0u16; 3];
    // SAFETY: the operation writes three words of two bytes.
    unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, sizes.as_mut_ptr()) == 0
    }
}

/// Counts the steps of the thread that created it, and of the threads that this thread starts.
#[derive(Clone)]
pub(crate) struct Steps(Arc<AtomicU64>);

/// The value of the counter at which no step kills the process.
const SAFE: u64 = u64::MAX;

impl Steps {
    /// Counts the calling thread's steps from here, starting at 1. Before step `last`, the
    /// supervising thread writes the monotonic time to `died` and kills the process. The filter
    /// cannot be removed. The function fails if Linux rejects the filter.
    pub(crate) fn until(last: u64, died: File) -> Result<Self> {
        let left = Arc::new(AtomicU64::new(last));
        // Not a channel: once the filter is active, the system call that wakes the receiver of a
        // channel would itself wait for this receiver.
        let listener = Arc::new(AtomicI32::new(-1));
        let (count, mailbox) = (Arc::clone(&left), Arc::clone(&listener));
        std::thread::spawn(move || {
            while mailbox.load(Ordering::Acquire) < 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            supervise(mailbox.load(Ordering::Acquire), &count, &died);
        });
        listener.store(filter()?, Ordering::Release);
        Ok(Self(left))
    }

    /// Lets the process survive all further steps.
    pub(crate) fn spare(&self) {
        self.0.store(SAFE, Ordering::Release);
    }
}

pub(crate) fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Writes the monotonic time to `died` and kills this process.
pub(crate) fn die(died: &File) -> ! {
    rustix::io::write(died, monotonic().to_string().as_bytes()).expect("written");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .expect("killed");
    unreachable!("SIGKILL was survived");
}

/// Returns the listener of a filter over this thread that reports every call except the quiet ones.
fn filter() -> Result<RawFd> {
    let statement =
        |code: u32, k: u32, jt: u8| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    // The first word of a filter's input is the number of the call.
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, call) in QUIET.iter().enumerate() {
        // Jumps to the last statement, past the other comparisons and the report.
        let to_end = (QUIET.len() - index) as u8;
        program.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *call as u32, to_end));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF, 0));
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes only numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(Error::last_os_error());
    }
    let (operation, flags) =
        (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: `program` and the memory it points to live until the call returns, and the kernel
    // keeps a copy.
    let listener =
        unsafe { libc::syscall(libc::SYS_seccomp, operation, flags, &raw const program) };
    if listener < 0 { Err(Error::last_os_error()) } else { Ok(listener as RawFd) }
}

/// Lets every system call continue until `left` reaches 0, and then kills the process. Must not
/// allocate, because a call may come from inside the allocator.
fn supervise(listener: RawFd, left: &AtomicU64, died: &File) {
    loop {
        // SAFETY: all zeroes is a valid value of this structure of integers, and the one that the
        // kernel requires.
        let mut requested: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request writes a `seccomp_notif`, which `requested` is.
        if unsafe { libc::ioctl(listener, NOTIF_RECV, &raw mut requested) } != 0 {
            continue;
        }
        let spared = left.load(Ordering::Acquire) == SAFE;
        if !spared && left.fetch_sub(1, Ordering::AcqRel) == 1 {
            die(died);
        }
        let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let mut answer = libc::seccomp_notif_resp { id: requested.id, val: 0, error: 0, flags };
        // SAFETY: the request reads a `seccomp_notif_resp`, which `answer` is. It fails if the
        // calling thread has exited.
        unsafe { libc::ioctl(listener, NOTIF_SEND, &raw mut answer) };
    }
}
