//! The one error type. Its kind decides which Python exception a caller sees.

/// The kind of an error, by how a user reacts to it.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A member exited, left or aborted: `SymmPeerError`.
    Peer = 1,
    /// A deadline passed: `SymmTimeoutError`.
    Timeout = 2,
    /// Members disagree on a call: `SymmMismatchError`.
    Mismatch = 3,
    /// The group could not be formed here: `SymmConfigError`.
    Config = 4,
    /// This rank's own `abort()` ended the call: `SymmAbortedError`.
    Aborted = 5,
    /// A bad argument value: `ValueError`.
    Value = 6,
    /// A bad argument type: `TypeError`.
    Type = 7,
    /// Not supported for these arguments: `NotImplementedError`.
    NotImplemented = 8,
    /// `Work.wait(timeout)` timed out while the call itself continues: `SymmTimeoutError`, and the
    /// group stays usable.
    WaitTimeout = 9,
    /// A fault of this library or of the system: `DistBackendError`.
    Internal = 10,
    /// A store cannot be reached, or can no longer be reached: `DistNetworkError`.
    Network = 11,
    /// A queue of a store is empty: `QueueEmptyError`.
    QueueEmpty = 12,
}

impl ErrorKind {
    /// Every kind, in the order of their codes.
    pub const ALL: [Self; 12] = [
        ErrorKind::Peer,
        ErrorKind::Timeout,
        ErrorKind::Mismatch,
        ErrorKind::Config,
        ErrorKind::Aborted,
        ErrorKind::Value,
        ErrorKind::Type,
        ErrorKind::NotImplemented,
        ErrorKind::WaitTimeout,
        ErrorKind::Internal,
        ErrorKind::Network,
        ErrorKind::QueueEmpty,
    ];

    /// Returns the kind with this code, which is used in shared memory and the bridge.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns the kind that an error of another rank, with this code there, has on this rank:
    /// `Aborted` is only for the rank that aborted or was interrupted.
    pub fn from_peer(code: u8) -> Option<Self> {
        Self::from_code(code)
            .map(|kind| if kind == ErrorKind::Aborted { ErrorKind::Peer } else { kind })
    }
}

/// A failure: its kind and one lower-case sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The kind of the error, which decides which exception it becomes.
    pub kind: ErrorKind,
    /// The message: what happened to which rank, and after how long.
    pub message: String,
}

/// `Result` with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! constructors {
    ($($name:ident => $kind:ident),* $(,)?) => {
        impl Error {
            $(
                #[doc = concat!("An error of kind [`ErrorKind::", stringify!($kind), "`].")]
                pub fn $name(message: impl Into<String>) -> Self {
                    Self { kind: ErrorKind::$kind, message: message.into() }
                }
            )*
        }
    };
}

constructors! {
    peer => Peer,
    timeout => Timeout,
    mismatch => Mismatch,
    config => Config,
    aborted => Aborted,
    value => Value,
    not_implemented => NotImplemented,
    wait_timeout => WaitTimeout,
    internal => Internal,
    network => Network,
    queue_empty => QueueEmpty,
}

impl Error {
    /// Makes the error of a failed system call: the attempted action, then the system's reason.
    pub fn os(what: &str, errno: rustix::io::Errno) -> Self {
        Self::internal(format!("{what}: {errno}"))
    }

    /// Makes the error that `who` reports after a caught panic.
    pub fn panicked(who: &str, panic: &(dyn std::any::Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Self::internal(format!(
            "{who}: a bug in torch-symm: panic: {}",
            text.unwrap_or("no message")
        ))
    }
}

#[cfg(test)]
impl Error {
    /// Fails the test unless this error is of `kind` and its message has all `parts`.
    #[track_caller]
    pub(crate) fn assert_says(&self, kind: ErrorKind, parts: &[&str]) {
        assert_eq!(self.kind, kind, "{self}");
        for part in parts {
            assert!(self.message.contains(part), "{part:?} is not in: {self}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves P23
    #[test]
    fn codes_round_trip() {
        for code in 1..=12 {
            assert_eq!(ErrorKind::from_code(code).map(|kind| kind as u8), Some(code));
        }
        assert_eq!(ErrorKind::from_code(0), None);
        assert_eq!(ErrorKind::from_code(13), None);
    }
}
