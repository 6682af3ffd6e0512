//! The comparison of calls that use symmetric memory of the host without an operator of a window.

use super::Group;
use crate::error::Result;
use crate::sync::call_site::text_hash;
use crate::sync::shared_text;
use crate::sync::timeout::CallTimeout;
use crate::window::operators::agreement::agree;
use std::fmt::{self, Display};
use std::time::Instant;

/// Maximum length of the description of a call that ranks exchange.
const TEXT_BYTES: usize = 504;

/// The description of a call as ranks exchange it: a hash of all of it, and its start, which ends
/// with a mark if the rest is missing.
#[derive(PartialEq)]
struct CallText([u8; size_of::<u64>() + TEXT_BYTES]);

impl CallText {
    fn of(call: &str) -> Self {
        let mut found = Self([0; size_of::<u64>() + TEXT_BYTES]);
        let (hash, text) = found.0.split_at_mut(size_of::<u64>());
        hash.copy_from_slice(&text_hash(call).to_le_bytes());
        let shown = shared_text::start_of(call, TEXT_BYTES);
        text[..shown.len()].copy_from_slice(shown.as_bytes());
        found
    }
}

impl Display for CallText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = String::from_utf8_lossy(&self.0[size_of::<u64>()..]);
        f.write_str(text.trim_end_matches('\0'))
    }
}

impl Group {
    /// Returns once all ranks have called it with the same description of a call. All ranks must
    /// do so before one of them uses memory of another in that call.
    ///
    /// # Errors
    /// `Mismatch`, on all ranks, if the descriptions differ; the group continues.
    pub fn compare_operators(&self, call: &str) -> Result<()> {
        self.single_node("tensors are symmetric")?.check_alive()?;
        let limit = CallTimeout::from(Instant::now(), self.timeout());
        // Peers see the wait as one in a barrier of symmetric memory, and this call ends the
        // rejection of an earlier operator.
        self.control.enter_barrier();
        let own = CallText::of(call);
        let all = self.gather_to_compare(Some(&own.to_string()), &own.0, &limit);
        self.control.leave_barrier(all.is_ok());
        let text = |bytes: Vec<u8>| {
            let mut text = CallText::of("");
            text.0.copy_from_slice(&bytes);
            text
        };
        agree(&self.control, all?.into_iter().map(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_descriptions_are_marked_and_differ_in_their_hash() {
        let shown = |call: &str| CallText::of(call).to_string();
        for length in [0, 1, TEXT_BYTES] {
            let call = "a".repeat(length);
            assert_eq!(shown(&call), call);
        }
        // Two bytes each, and an odd number of bytes are free for them.
        let long = |end| "é".repeat(TEXT_BYTES) + end;
        assert_eq!(shown(&long("b")), "é".repeat(250) + "…");
        assert_eq!(shown(&long("b")), shown(&long("c")));
        assert!(CallText::of(&long("b")) != CallText::of(&long("c")));
    }
}
