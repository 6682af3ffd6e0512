//! Facts about nodes, for Python.

use super::ffi::Status;
use super::guarded;
use crate::coll::cost::network::RailThresholds;
use crate::internode::agreed_settings;
use crate::sys::node_id::NodeId;

pub(super) fn node_id() -> String {
    let mut text = String::new();
    let status = guarded(|| {
        text = format!("{:?}", NodeId::own()?);
        Ok(())
    });
    if text.is_empty() { status.message } else { text }
}

pub(super) fn set_trial_thresholds(
    multi_rail_bytes: usize,
    chunk_bytes: usize,
    gather_bytes: usize,
) -> Status {
    guarded(|| {
        agreed_settings::set_trial_thresholds((chunk_bytes > 0).then_some(RailThresholds {
            multi_rail_bytes,
            chunk_bytes,
            gather_bytes,
        }))
    })
}
