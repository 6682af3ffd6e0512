//! Hosts, as Python asks for them.

use super::ffi::Status;
use super::guarded;
use crate::coll::cost::wire::Thresholds;
use crate::hosts::chosen::try_out;
use crate::sys::host::Host;

pub(super) fn host_identity() -> String {
    let mut text = String::new();
    let status = guarded(|| {
        text = format!("{:?}", Host::own()?);
        Ok(())
    });
    if text.is_empty() { status.message } else { text }
}

pub(super) fn try_thresholds(one_rail: usize, piece: usize, gathered: usize) -> Status {
    guarded(|| try_out((piece > 0).then_some(Thresholds { one_rail, piece, gathered })))
}
