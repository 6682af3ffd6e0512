//! Processes: their identity, whether they live, what they are doing and how they ended.
#![allow(unsafe_code, reason = "system calls that have no safe form")]

use super::fork::PerProcess;
use super::required::unreadable;
use super::thread::Waker;
use crate::error::{Error, Result};
use crate::lock::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// A process, unique until reboot: process ids are reused, but not pairs with a start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessId {
    /// The process id.
    pub pid: u32,
    /// Start time, field 22 of `/proc/pid/stat`, in clock ticks after boot.
    pub start_time: u64,
}

/// Fields of `/proc/pid/stat`.
struct Stat {
    state: char,
    /// True for a process that has started to exit. The exit may not be complete, because freeing
    /// GPU memory takes a tenth of a second.
    exiting: bool,
    start_time: u64,
    /// Status as `waitpid` reports it; 0 while the process runs.
    status: i32,
}

/// The flag of an exiting thread; `/proc` shows the flags of a process's first thread.
const EXITING: u32 = 4;

impl Stat {
    fn over(&self) -> bool {
        self.exiting || matches!(self.state, 'Z' | 'X')
    }

    /// Reads the fields of process `pid`; `None` if it does not exist. Fails if no file descriptor
    /// is free.
    fn read(pid: u32) -> rustix::io::Result<Option<Self>> {
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::SRCH) | None => Ok(None),
                Some(errno) => Err(errno),
            },
        }
    }

    fn parse(text: &str) -> Option<Self> {
        // The name in field 2 may contain spaces and parentheses; field 3 follows its last
        // parenthesis.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            state: fields.first()?.chars().next()?,
            exiting: fields.get(9 - 3)?.parse::<u32>().ok()? & EXITING != 0,
            start_time: fields.get(22 - 3)?.parse().ok()?,
            status: fields.get(52 - 3).and_then(|field| field.parse().ok()).unwrap_or(0),
        })
    }
}

/// Returns the identity of this process.
pub fn own() -> Result<ProcessId> {
    static OWN: PerProcess<OnceLock<ProcessId>> = PerProcess::new(OnceLock::new);
    if let Some(own) = OWN.get().get() {
        return Ok(*own);
    }
    let pid = std::process::id();
    let stat =
        Stat::read(pid).map_err(|errno| unreadable(&format!("/proc/{pid}/stat"), &errno.into()))?;
    // /proc is not mounted or belongs to another pid namespace.
    let stat = stat.ok_or_else(|| {
        Error::config(format!(
            "/proc does not show this process, pid {pid}: mount it here (mount -t proc proc /proc)"
        ))
    })?;
    Ok(*OWN.get().get_or_init(|| ProcessId { pid, start_time: stat.start_time }))
}

/// The pidfds of known processes, so that 200 groups with the same members hold one pidfd per
/// member.
static KNOWN: PerProcess<Mutex<HashMap<ProcessId, Weak<OwnedFd>>>> =
    PerProcess::new(|| Mutex::new(HashMap::new()));

/// Returns a pidfd of `process`, shared by all callers; `None` if the process has ended and been
/// reaped. Needs no permission over that process.
pub fn open(process: ProcessId) -> rustix::io::Result<Option<Arc<OwnedFd>>> {
    let mut known = lock(KNOWN.get());
    if let Some(fd) = known.get(&process).and_then(Weak::upgrade) {
        return Ok(Some(fd));
    }
    let Some(pid) = i32::try_from(process.pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw)
    else {
        return Ok(None);
    };
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Arc::new(fd),
        Err(Errno::SRCH) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    // Checked after opening: if `process` has the pid now, it also had it when the pidfd was made.
    if Stat::read(process.pid)?.is_none_or(|stat| stat.start_time != process.start_time) {
        return Ok(None);
    }
    known.retain(|_, fd| fd.strong_count() > 0);
    known.insert(process, Arc::downgrade(&fd));
    Ok(Some(fd))
}

/// Returns true if this process holds a pidfd of a process with the id `pid` and that process has
/// ended, so that another process may have the id now.
pub fn has_ended(pid: u32) -> bool {
    let known = lock(KNOWN.get());
    let mut named = known
        .iter()
        .filter(|(process, _)| process.pid == pid)
        .filter_map(|(_, fd)| fd.upgrade())
        .peekable();
    named.peek().is_some() && named.all(|fd| ended(&fd))
}

/// Registers `process` under a pidfd that a test chose.
#[cfg(test)]
pub(super) fn know(process: ProcessId, fd: &Arc<OwnedFd>) {
    lock(KNOWN.get()).insert(process, Arc::downgrade(fd));
}

/// Returns the state of a process in words; `None` if it does not exist.
pub fn state(pid: u32) -> Option<&'static str> {
    let stat = Stat::read(pid).ok()??;
    if stat.over() {
        return Some("exited");
    }
    Some(match stat.state {
        'R' => "alive, running",
        'T' | 't' => "alive, stopped (T)",
        'D' => "alive, in the kernel (D)",
        _ => "alive, asleep",
    })
}

/// Returns true if a process has ended or is exiting, whatever it still has to free.
pub fn is_ending(process: ProcessId) -> bool {
    let stat = Stat::read(process.pid).ok().flatten();
    stat.is_none_or(|stat| stat.start_time != process.start_time || stat.over())
}

/// The suspects, which are processes that may be exiting, and the waker of the thread that checks
/// them.
#[derive(Default)]
struct PossiblyExiting {
    pids: Vec<u32>,
    listener: Weak<Waker>,
}

static SUSPECTS: PerProcess<Mutex<PossiblyExiting>> = PerProcess::new(Mutex::default);

/// Reports that a connection to process `pid` has ended, so the process may be exiting. An exiting
/// process closes its file descriptors, the highest first, before it frees its GPU memory, and its
/// pidfd becomes readable only after that, a tenth of a second later.
pub fn suspect(pid: u32) {
    let mut suspects = lock(SUSPECTS.get());
    if let Some(listener) = suspects.listener.upgrade() {
        suspects.pids.push(pid);
        listener.notify();
    }
}

/// Wakes `listener` for each suspect from now on.
pub fn report_suspects_to(listener: &Arc<Waker>) {
    let mut suspects = lock(SUSPECTS.get());
    suspects.pids.clear();
    suspects.listener = Arc::downgrade(listener);
}

/// Returns the suspects since the last call.
pub fn suspects() -> Vec<u32> {
    std::mem::take(&mut lock(SUSPECTS.get()).pids)
}

/// Returns true if the process of `pidfd` has ended, whether reaped or not.
pub fn ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Returns how a process ended that has ended or [is exiting](is_ending): `"killed by signal 9
/// (SIGKILL)"`, `"exited with code 3"`, or `"gone"` if the cause is unknown. The cause comes from
/// the process's entry in /proc until the process is reaped, and then from the kernel (6.15 and
/// later).
pub fn exit_cause(process: ProcessId, pidfd: &OwnedFd) -> String {
    let zombie = || {
        Stat::read(process.pid)
            .ok()
            .flatten()
            .filter(|stat| stat.start_time == process.start_time && stat.over())
            .map(|stat| stat.status)
    };
    // The kernel is queried twice in case the process is reaped between the queries.
    reaped_status(pidfd)
        .or_else(zombie)
        .or_else(|| reaped_status(pidfd))
        .map_or_else(|| "gone".into(), describe)
}

/// Returns the exit code that the text `how`, which contains an [`exit_cause`], names.
pub fn exit_code(how: &str) -> Option<i32> {
    let (_, code) = how.split_once("exited with code ")?;
    code.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn reaped_status(pidfd: &OwnedFd) -> Option<i32> {
    const EXIT: u64 = 1 << 3;
    // SAFETY: all-zero is a value of this structure of integers.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    info.mask = EXIT;
    // SAFETY: the request carries the size of `info`, which is valid for reads and writes of it.
    let status = unsafe { libc::ioctl(pidfd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) };
    (status == 0 && info.mask & EXIT != 0).then_some(info.exit_code)
}

/// Formats a `waitpid` status as the end of a sentence.
fn describe(status: i32) -> String {
    const NAMES: [(i32, &str); 15] = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGQUIT, "SIGQUIT"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGTRAP, "SIGTRAP"),
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGUSR1, "SIGUSR1"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGUSR2, "SIGUSR2"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGALRM, "SIGALRM"),
        (libc::SIGTERM, "SIGTERM"),
    ];
    match status & 0x7f {
        0 => format!("exited with code {}", status >> 8 & 0xff),
        signal => match NAMES.iter().find(|(number, _)| *number == signal) {
            Some((_, name)) => format!("killed by signal {signal} ({name})"),
            None => format!("killed by signal {signal}"),
        },
    }
}

/// Returns how much address space this process may still use, in words; `None` without a limit.
pub fn address_space() -> Option<String> {
    let limit = getrlimit(Resource::As).current?;
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().next()?.parse().ok()?;
    let free = limit.saturating_sub(pages * rustix::param::page_size() as u64);
    Some(format!("{free} are free of RLIMIT_AS {limit}"))
}

/// Returns this process's limit on open file descriptors.
pub fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Raises the limit on open file descriptors to `wanted` or the hard limit, whichever is lower;
/// never lowers it.
pub fn raise_descriptor_limit(wanted: u64) {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(wanted, |most| wanted.min(most));
    if limit.current.is_some_and(|current| current < wanted)
        && let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
    {
        log::debug!("RLIMIT_NOFILE stays at {:?}, {wanted} cannot be had: {errno}", limit.current);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the identity of the living process `pid`.
    pub(crate) fn identity(pid: u32) -> ProcessId {
        let stat = Stat::read(pid).expect("readable").expect("it lives");
        ProcessId { pid, start_time: stat.start_time }
    }

    #[test]
    fn a_stat_line_is_read_past_any_name() {
        let mut line = String::from("7 (a) b (c)) S");
        for field in 4..=52 {
            line.push_str(&format!(" {field}"));
        }
        let stat = Stat::parse(&line).expect("a whole line");
        assert_eq!((stat.state, stat.exiting, stat.start_time, stat.status), ('S', false, 22, 52));
        assert!(
            Stat::parse(&line.replace(" 9 ", " 4194308 "))
                .is_some_and(|stat| stat.exiting && stat.over())
        );
        assert!(Stat::parse("7 (a) S 1").is_none());
        assert!(Stat::parse("").is_none());
    }

    #[test]
    fn this_process_runs() {
        assert!(state(std::process::id()).is_some());
        assert_eq!(state(u32::MAX), None);
    }

    #[test]
    fn causes_read_as_the_end_of_a_sentence() {
        assert_eq!(describe(9), "killed by signal 9 (SIGKILL)");
        assert_eq!(describe(11 | 0x80), "killed by signal 11 (SIGSEGV)");
        assert_eq!(describe(40), "killed by signal 40");
        assert_eq!(describe(3 << 8), "exited with code 3");
        assert_eq!(exit_code("has ended (exited with code 30)"), Some(30));
        assert_eq!(exit_code("has ended (killed by signal 9 (SIGKILL))"), None);
    }

    #[test]
    fn descriptors_of_one_process_are_shared_and_ends_are_told() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
        let process = identity(child.id());
        let fd = open(process).expect("opens").expect("lives");
        assert!(Arc::ptr_eq(&fd, &open(process).expect("opens").expect("lives")));
        let other = ProcessId { start_time: process.start_time + 1, ..process };
        assert!(open(other).expect("opens").is_none());
        assert!(!ended(&fd) && !is_ending(process) && is_ending(other));
        assert!(!has_ended(child.id()) && !has_ended(std::process::id()));
        child.kill().expect("killed");
        while !ended(&fd) {
            std::thread::yield_now();
        }
        assert!(is_ending(process));
        assert_eq!(exit_cause(process, &fd), "killed by signal 9 (SIGKILL)");
        child.wait().expect("reaped");
        assert!(has_ended(child.id()), "whoever has the number now is another");
        let reaped = exit_cause(process, &fd);
        assert!(reaped == "killed by signal 9 (SIGKILL)" || reaped == "gone", "{reaped}");
    }
}
