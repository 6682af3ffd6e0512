//! System calls that every group needs, and the remedies for machines that reject them.

use crate::error::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::fmt::Display;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident: $calls:literal, $purpose:literal;)*) => {
        /// A step of a group that needs system calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Required {
            $($(#[$doc])* $name,)*
        }

        impl Required {
            /// Every step, in the order in which a group first needs it.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the names of the system calls, as in a seccomp profile.
            pub fn calls(self) -> &'static str {
                match self {
                    $(Self::$name => $calls,)*
                }
            }

            /// Returns the purpose of the step, for messages.
            pub fn purpose(self) -> &'static str {
                match self {
                    $(Self::$name => $purpose,)*
                }
            }
        }
    };
}

calls! {
    /// Random names and tokens.
    Random: "getrandom", "random names";
    /// An unnamed file for memory that ranks share.
    Memory: "memfd_create", "shared memory";
    /// The size of that file.
    Size: "ftruncate", "the size of shared memory";
    /// Seals that make that size final.
    Seal: "fcntl", "seals of shared memory";
    /// Pages of that file, allocated before they are touched.
    Pages: "fallocate", "pages of shared memory";
    /// The status of a file that a peer sent.
    Look: "fstat", "a look at shared memory";
    /// A mapping of that file.
    Map: "mmap", "mapping shared memory";
    /// A Unix socket to which peers connect.
    Listen: "socket, bind or listen", "a Unix socket for its peers";
    /// A Unix socket to a peer.
    Connect: "socket or connect", "a Unix socket to a peer";
    /// The next peer at a socket.
    Accept: "accept4", "the connection of a peer";
    /// The process at the other end of a socket.
    Identify: "getsockopt", "the identity of a peer";
    /// A message to a peer, with a file descriptor.
    Send: "sendmsg", "a descriptor for a peer";
    /// A message from a peer, with a file descriptor.
    Receive: "recvmsg", "a descriptor from a peer";
    /// A wait for several file descriptors.
    Poll: "ppoll", "waiting for its peers";
    /// A pidfd, which becomes readable when another rank's process ends.
    Watch: "pidfd_open", "watching a peer's process";
    /// A file descriptor that wakes a thread.
    Wake: "eventfd2", "waking its threads";
    /// A thread of the library.
    Thread: "clone3 or clone", "a thread";
}

impl Required {
    /// Returns the error of this step. If the machine forbids the call or a limit prevents it,
    /// groups do not work here, and the message has the remedy; any other failure is a fault of the
    /// system.
    pub fn failed(self, errno: Errno) -> Error {
        let (kind, advice) = match errno {
            // `INTR` means a call that never succeeds ([`retry`](super::eintr::retry)).
            Errno::NOSYS | Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::INTR => (
                ErrorKind::Config,
                "; a container's seccomp profile, a security module or Linux before 5.3 forbids \
                 this system call: allow it there"
                    .into(),
            ),
            Errno::FBIG => {
                let limit = getrlimit(Resource::Fsize)
                    .current
                    .map_or_else(|| "unlimited".into(), |limit| limit.to_string());
                (
                    ErrorKind::Config,
                    format!(
                        "; RLIMIT_FSIZE is {limit} and limits shared memory, \
                    too: ulimit -f unlimited"
                    ),
                )
            }
            Errno::MFILE => {
                let (limit, open) = descriptors();
                let limit = limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string());
                (
                    ErrorKind::Config,
                    format!(
                        "; RLIMIT_NOFILE is {limit} and {open} descriptors are \
                    open: raise ulimit -n"
                    ),
                )
            }
            Errno::NFILE => (
                ErrorKind::Config,
                "; the machine has as many open files as \
                fs.file-max allows: raise it"
                    .into(),
            ),
            Errno::AGAIN if self == Self::Thread => (
                ErrorKind::Config,
                "; RLIMIT_NPROC or pids.max of the control group limits \
                    threads: raise it"
                    .into(),
            ),
            Errno::NOMEM | Errno::NOSPC => (
                ErrorKind::Config,
                "; memory or addresses are short: free some, or raise the \
                    container's limit"
                    .into(),
            ),
            _ => (ErrorKind::Internal, String::new()),
        };
        Error {
            kind,
            message: format!("{} failed, for {}: {errno}{advice}", self.calls(), self.purpose()),
        }
    }
}

/// Returns the error of an unreadable file of `/proc`.
pub fn unreadable(path: &str, error: &std::io::Error) -> Error {
    let remedy = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE) => "raise ulimit -n",
        _ => "mount all of /proc here, and leave this path unmasked",
    };
    Error::config(format!("{path} cannot be read: {error}; {remedy}"))
}

/// Returns this process's limit on open file descriptors, and how many are open.
pub fn descriptors() -> (Option<u64>, usize) {
    let limit = getrlimit(Resource::Nofile).current;
    // One of the entries is the descriptor of the listing itself. If no descriptor is free for the
    // listing, as many are open as the limit allows.
    let open = std::fs::read_dir("/proc/self/fd").map_or_else(
        |_| limit.map_or(0, |limit| usize::try_from(limit).unwrap_or(usize::MAX)),
        |entries| entries.count().saturating_sub(1),
    );
    (limit, open)
}

/// Fails unless this process may open `needed` further file descriptors for its `purpose`. For
/// libraries that end the process if they cannot open one.
///
/// # Errors
/// `Config` names the limit.
pub fn ensure_descriptors(needed: usize, purpose: impl Display) -> Result<()> {
    match descriptors() {
        (Some(limit), open) if limit < (open + needed) as u64 => Err(Error::config(format!(
            "RLIMIT_NOFILE {limit} is too low: {open} descriptors are open and {purpose} needs up \
             to {needed} more: raise ulimit -n"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork;
    use rustix::process::{Rlimit, setrlimit};

    #[test]
    fn what_the_machine_forbids_or_limits_is_a_matter_of_configuration() {
        let cases = [
            (
                Required::Memory,
                Errno::PERM,
                ErrorKind::Config,
                "memfd_create failed, for shared memory: Operation not permitted",
            ),
            (Required::Pages, Errno::OPNOTSUPP, ErrorKind::Config, "seccomp"),
            (Required::Watch, Errno::NOSYS, ErrorKind::Config, "Linux before 5.3"),
            (Required::Size, Errno::FBIG, ErrorKind::Config, "ulimit -f unlimited"),
            (Required::Wake, Errno::MFILE, ErrorKind::Config, "raise ulimit -n"),
            (Required::Wake, Errno::NFILE, ErrorKind::Config, "fs.file-max"),
            (Required::Thread, Errno::AGAIN, ErrorKind::Config, "pids.max"),
            (Required::Map, Errno::NOMEM, ErrorKind::Config, "short"),
            (Required::Send, Errno::AGAIN, ErrorKind::Internal, "sendmsg failed"),
            (Required::Poll, Errno::INVAL, ErrorKind::Internal, "ppoll failed"),
        ];
        for (step, errno, kind, text) in cases {
            let error = step.failed(errno);
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.message.contains(text), "{error}");
        }
    }

    #[test]
    fn a_library_that_needs_descriptors_is_not_called_without_them() {
        // In a child, because other tests open and close descriptors meanwhile.
        let child = fork::tests::forked(|| {
            let (_, open) = descriptors();
            let limit = Rlimit { current: Some(open as u64 + 8), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, limit).is_ok()
                && ensure_descriptors(8, "a rail") == Ok(())
                && ensure_descriptors(9, "a rail").is_err_and(|error| {
                    let text = format!("RLIMIT_NOFILE {} is too low: {open} desc", open + 8);
                    error.kind == ErrorKind::Config
                        && error.message.starts_with(&text)
                        && error.message.contains("a rail needs up to 9 more")
                })
        });
        assert_eq!(fork::tests::status_of(child), 0);
    }
}
