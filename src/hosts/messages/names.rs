//! How errors name messages, and the ranks between which they are.

use super::Messages;
use super::open::Open;
use super::pair::{Pair, Phase};
use crate::dtype::DType;
use crate::error::Error;
use crate::host_map::HostMap;
use crate::hosts::rail::Life;
use crate::messages::MessageSpec;
use crate::rank::Rank;
use std::sync::Arc;

/// What error messages name.
pub(in crate::hosts) struct Names {
    pub(in crate::hosts) layout: Arc<HostMap>,
    pub(in crate::hosts) me: Rank,
    pub(in crate::hosts) group: String,
    pub(in crate::hosts) life: Life,
    /// Ranks of the members in the default group; empty: the same as here.
    pub(in crate::hosts) globals: Vec<i32>,
}

impl Messages {
    /// Name of a message.
    pub(super) fn about(&self, name: &str, open: &Open) -> String {
        let MessageSpec { span, tag, dtype, .. } = *open.message;
        self.described(name, span.bytes as u64, Some(dtype), tag)
    }

    /// Name of a message of `bytes`, whose element type is unknown where it is `None`.
    pub(super) fn described(&self, name: &str, bytes: u64, dtype: Option<DType>, tag: i32) -> String {
        format!("{name}({bytes} bytes, {}, tag {tag}) of group \"{}\"", dtype.map_or("unknown", DType::name), self.names.group)
    }

    /// The error of `open`, whose time is up.
    pub(super) fn late(&self, pair: &Pair, name: &str, open: &Open) -> Error {
        let (me, peer) = (self.names.layout.describe(self.names.me), self.names.layout.describe(pair.peer));
        let state = match (&pair.phase, name) {
            (Phase::Meeting, _) => "which has begun no message with it",
            (Phase::Open | Phase::Lost(_), "send") => "which did not receive it",
            (Phase::Open | Phase::Lost(_), _) => "which did not send it",
        };
        let (what, seconds) = (self.about(name, open), open.limit.waited().as_secs_f32());
        Error::timeout(format!("{me} waited {seconds:.1} s until its timeout in {what} for {peer}, {state}"))
    }
}
