//! What each rank tells the others about itself, through the store.

use super::JoinSpec;
use crate::error::{Error, Result};
use crate::rank::{Rank, name_ranks};
use crate::sys::host;
use crate::sys::pidfd::{self, Process};
use serde::{Deserialize, Serialize};

/// Changes whenever records, greetings or the memory layout change.
const PROTOCOL: u32 = 1;

/// A rank's entry in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub protocol: u32,
    pub version: String,
    pub rank: u32,
    pub size: usize,
    pub host: String,
    pub pid: u32,
    pub start_time: u64,
    pub uid: u32,
    /// Abstract unix socket of rank 0; empty for others.
    pub socket: String,
    /// Random, of this attempt. Rank 0's is the token that every greeting carries.
    pub nonce: String,
    /// The GPU this rank uses; no rank has one until the CUDA plane exists.
    pub gpu: Option<String>,
}

impl Record {
    pub(super) fn new(spec: &JoinSpec<'_>, socket: &str) -> Result<Self> {
        let (pid, start_time) = pidfd::own()?;
        Ok(Self {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            rank: spec.rank.0,
            size: spec.size,
            host: host::identity()?,
            pid,
            start_time,
            uid: rustix::process::geteuid().as_raw(),
            socket: socket.into(),
            nonce: host::random_name()?,
            gpu: None,
        })
    }

    pub(super) fn process(&self) -> Process {
        (self.pid, self.start_time)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|e| {
            let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
            Error::config(format!("a record in the store is not one of torch-symm {} ({e}): {text}", env!("CARGO_PKG_VERSION")))
        })
    }
}

/// Fails unless all records are of one version, world and host.
pub(super) fn compare(records: &[Record], spec: &JoinSpec<'_>) -> Result<()> {
    let first = &records[0];
    let differing = |differs: &dyn Fn(&Record) -> bool| -> Option<(String, &Record)> {
        let others: Vec<&Record> = records.iter().filter(|record| differs(record)).collect();
        let ranks: Vec<Rank> = others.iter().map(|record| Rank(record.rank)).collect();
        Some((name_ranks(&ranks), *others.first()?))
    };
    let group = spec.group;
    if let Some((ranks, other)) = differing(&|r| (r.protocol, &r.version) != (first.protocol, &first.version)) {
        return Err(Error::config(format!(
            "{ranks} of group \"{group}\" run torch-symm {} (protocol {}), rank 0 runs {} (protocol {}); install one version everywhere",
            other.version, other.protocol, first.version, first.protocol
        )));
    }
    if let Some((ranks, other)) = differing(&|r| r.size != first.size) {
        return Err(Error::config(format!("{ranks} of group \"{group}\" count {} members, rank 0 counts {}", other.size, first.size)));
    }
    if let Some((ranks, _)) = differing(&|r| r.host != first.host) {
        return Err(Error::config(format!(
            "{ranks} of group \"{group}\" run on another host or in another container than rank 0; torch-symm connects the ranks of one \
             host only, until it supports several"
        )));
    }
    if let Some((ranks, other)) = differing(&|r| r.uid != first.uid) {
        let (theirs, ours) = (other.uid, first.uid);
        return Err(Error::config(format!(
            "{ranks} of group \"{group}\" run as user {theirs}, rank 0 as user {ours}; one user must run all"
        )));
    }
    Ok(())
}
