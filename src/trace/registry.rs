//! The groups that entries belong to: those that are open, and the last that were left.

use super::clock;
use crate::coll::cuda::agreement::launch_log;
use crate::control::ControlBlock;
use crate::error::{Error, Kind};
use crate::rank::Rank;
use crate::sys::process;
use serde::Serialize;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Groups that were left and are still known. With those before them their entries go: 1000 groups one after the other take no more memory.
const LEFT: usize = 64;

/// A member, as the dump lists it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Member {
    pub(super) rank: u32,
    pub(super) global_rank: u32,
    pub(super) pid: u32,
}

/// Peer as this rank knew it at a moment.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Peer {
    #[serde(flatten)]
    pub(super) place: Member,
    /// State of its process; `None`: there was none.
    pub(super) process: Option<&'static str>,
    /// Number of the last collective on the host that it had begun.
    pub(super) begun: u64,
    /// Number of the last collective on CUDA that it had launched, if this rank used a GPU.
    pub(super) launched: Option<u64>,
    /// Reason why it was unable to take part.
    pub(super) absence: Option<String>,
}

/// The first failure that this rank saw of a group, and what it knew of the others then.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: Kind,
    pub(super) message: String,
    pub(super) at: u64,
    pub(super) peers: Vec<Peer>,
}

/// A group of which this process is, or was, a member.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) id: u64,
    /// Number of the memory that all members share; the same on all of them.
    pub(super) memory: u64,
    pub(super) name: String,
    pub(super) rank: Rank,
    pub(super) members: Vec<Member>,
    /// Hosts beside this one, as messages name them.
    pub(super) other_hosts: Option<String>,
    /// A collective in which this rank waits or has waited, and the hosts that have not come to it.
    pub(super) late_hosts: Option<(u64, String)>,
    pub(super) timeout_ms: u64,
    pub(super) joined: u64,
    pub(super) left: u64,
    pub(super) failure: Option<Failure>,
    /// Last collective begun and launched, since the group was left.
    last: (u64, Option<u64>),
    control: Weak<ControlBlock>,
    cuda: bool,
}

impl Record {
    /// Last collective begun on the host, and launched on CUDA.
    pub(super) fn last(&self) -> (u64, Option<u64>) {
        self.control.upgrade().filter(|_| self.left == 0).map_or(self.last, |control| reached(&control, self.rank, self.cuda))
    }

    /// Members as they are known now; none once the group was left.
    pub(super) fn peers(&self) -> Vec<Peer> {
        let control = self.control.upgrade().filter(|_| self.left == 0);
        control.map_or_else(Vec::new, |control| peers(&control, self.cuda))
    }
}

fn reached(control: &ControlBlock, rank: Rank, cuda: bool) -> (u64, Option<u64>) {
    // Without a GPU nobody has reserved the launch log's memory, and a look would.
    (control.collective(rank), cuda.then(|| launch_log::launched(control, rank)))
}

fn place(control: &ControlBlock, rank: Rank) -> Member {
    Member { rank: rank.0, global_rank: control.global(rank), pid: control.pid(rank) }
}

fn peers(control: &ControlBlock, cuda: bool) -> Vec<Peer> {
    let peer = |rank: Rank| {
        let (begun, launched) = reached(control, rank, cuda);
        let process = process::state(control.pid(rank));
        // Another rank may have told of a death that this one's watcher has yet to see.
        let over = || process.is_none_or(|state| state == "exited").then(|| "has ended".into());
        Peer { place: place(control, rank), process, begun, launched, absence: control.absence(rank).or_else(over) }
    };
    control.ranks().map(peer).collect()
}

#[derive(Default)]
pub(super) struct Registry {
    records: Vec<Record>,
    next: u64,
}

impl Registry {
    /// Takes note of a group; returns its number in this process.
    pub(super) fn add(&mut self, control: &Arc<ControlBlock>, timeout: Duration) -> u64 {
        self.next += 1;
        self.records.push(Record {
            id: self.next,
            memory: control.segment().identity(),
            name: control.name().into(),
            rank: control.rank(),
            members: control.ranks().map(|rank| place(control, rank)).collect(),
            other_hosts: None,
            late_hosts: None,
            timeout_ms: super::milliseconds(timeout),
            joined: clock::now(),
            left: 0,
            failure: None,
            last: (0, None),
            control: Arc::downgrade(control),
            cuda: false,
        });
        self.next
    }

    fn find(&mut self, id: u64) -> Option<&mut Record> {
        self.records.iter_mut().find(|record| record.id == id)
    }

    /// The group has ranks on `others`, too.
    pub(super) fn note_hosts(&mut self, id: u64, others: String) {
        if let Some(record) = self.find(id) {
            record.other_hosts = Some(others);
        }
    }

    /// Collective `sequence` waits for `hosts` among the others.
    pub(super) fn note_late(&mut self, id: u64, sequence: u64, hosts: String) {
        if let Some(record) = self.find(id) {
            record.late_hosts = Some((sequence, hosts));
        }
    }

    /// The group has used a GPU.
    pub(super) fn note_cuda(&mut self, id: u64) {
        if let Some(record) = self.find(id) {
            record.cuda = true;
        }
    }

    /// The group has failed.
    pub(super) fn note_failure(&mut self, id: u64, control: &ControlBlock, error: &Error) {
        if let Some(record) = self.find(id)
            && record.failure.is_none()
        {
            let peers = peers(control, record.cuda);
            record.failure = Some(Failure { kind: error.kind, message: error.message.clone(), at: clock::now(), peers });
        }
    }

    /// The group was left.
    pub(super) fn leave(&mut self, id: u64) {
        let Some(record) = self.find(id).filter(|record| record.left == 0) else { return };
        record.last = record.last();
        record.left = clock::now();
        record.control = Weak::new();
        let left = |record: &&Record| record.left != 0;
        if self.records.iter().filter(left).count() > LEFT
            && let Some(oldest) = self.records.iter().filter(left).min_by_key(|record| record.left).map(|record| record.id)
        {
            self.records.retain(|record| record.id != oldest);
        }
    }

    /// Says that the process of a rank of the job has ended, as a group of which this process is still a member knows: "rank 3 (pid 77) of
    /// group \"default\" has ended (exited with code 1)".
    pub(super) fn ended(&self, global: u32) -> Option<String> {
        let open = self.records.iter().filter(|record| record.left == 0);
        open.filter_map(|record| record.control.upgrade()).filter(|control| control.any_ended()).find_map(|control| {
            let rank = control.ranks().find(|&rank| control.global(rank) == global)?;
            Some(format!("{} of group \"{}\" {}", control.describe(rank), control.name(), control.ended(rank)?))
        })
    }

    /// Records of all groups that are known, in the order in which they were joined.
    pub(super) fn records(&self) -> Vec<Record> {
        self.records.clone()
    }
}
