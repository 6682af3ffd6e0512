//! The topology of the GPUs, for C++.

use super::ffi::{LinkMatrix, TextResult};
use super::guarded;
use crate::topo;

pub(super) fn nvlink_matrix(uuids: &[String]) -> LinkMatrix {
    let mut links = Vec::new();
    let status = guarded(|| {
        links = topo::connectivity_of(uuids)?.rows().flatten().copied().collect();
        Ok(())
    });
    LinkMatrix { status, links }
}

pub(super) fn topology_report() -> TextResult {
    let mut text = String::new();
    let status = guarded(|| {
        text = topo::report::render(&topo::detect()?);
        Ok(())
    });
    TextResult { status, text }
}
