//! The groups of the recorded calls: the open ones, and the last ones that were left.

use super::clock;
use crate::coll::cuda::agreement::launch_log;
use crate::control::ControlBlock;
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use crate::sys::process;
use serde::Serialize;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Number of groups that stay known after they were left. Older groups and their entries are
/// forgotten, so 1000 successive groups take no more memory.
const LEFT: usize = 64;

/// A member, as listed in the dump.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct DumpMember {
    /// The rank in the group, on all nodes.
    pub(super) rank: u32,
    pub(super) global_rank: u32,
    pub(super) pid: u32,
}

/// A peer, as this rank knew it at some moment.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DumpPeer {
    #[serde(flatten)]
    pub(super) place: DumpMember,
    /// The state of its process; `None` if the process did not exist.
    pub(super) process: Option<&'static str>,
    /// The number of the last CPU collective that it had started.
    pub(super) begun: u64,
    /// The number of the last CUDA collective that it had launched, if this rank used a GPU.
    pub(super) launched: Option<u64>,
    /// Why it was unable to take part.
    pub(super) absence: Option<String>,
}

/// The first group failure that this rank saw, and the state of the peers at that time.
#[derive(Clone, Debug)]
pub(super) struct ObservedFailure {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
    pub(super) at: u64,
    pub(super) peers: Vec<DumpPeer>,
}

/// A group that has or had this process as a member.
#[derive(Clone, Debug)]
pub(super) struct GroupRecord {
    pub(super) id: u64,
    /// A number that all members share: the id of the group's shared memory or, on several nodes,
    /// the random id of the group.
    pub(super) memory: u64,
    pub(super) name: String,
    /// This rank among the ranks of its node.
    rank: Rank,
    /// The ranks on this node, by local rank.
    pub(super) members: Vec<DumpMember>,
    /// The ranks of the group in the default group, on all nodes.
    pub(super) global_ranks: Vec<u32>,
    /// The group's other nodes, as messages name them.
    pub(super) other_nodes: Option<String>,
    /// A collective of CPU tensors in which this rank waits or has waited, and the nodes that are
    /// late for it.
    pub(super) late_nodes: Option<(u64, String)>,
    pub(super) timeout_ms: u64,
    pub(super) joined: u64,
    pub(super) left: u64,
    pub(super) failure: Option<ObservedFailure>,
    /// Numbers of the last collective started on CPU tensors and of the last one launched on CUDA,
    /// as they were when the group was left.
    last: (u64, Option<u64>),
    control: Weak<ControlBlock>,
    cuda: bool,
}

impl GroupRecord {
    /// Returns the rank in the group of `local`, a rank among the ranks of this node.
    pub(super) fn rank_of(&self, local: Rank) -> u32 {
        self.members.get(local.index()).map_or(local.0, |member| member.rank)
    }

    /// Returns this rank in the group.
    pub(super) fn own_rank(&self) -> u32 {
        self.rank_of(self.rank)
    }

    /// Returns the numbers of the last collective started on CPU tensors and of the last one
    /// launched on CUDA.
    pub(super) fn last(&self) -> (u64, Option<u64>) {
        self.control
            .upgrade()
            .filter(|_| self.left == 0)
            .map_or(self.last, |control| reached(&control, self.rank, self.cuda))
    }

    /// Returns the present state of the members; empty once the group was left.
    pub(super) fn peers(&self) -> Vec<DumpPeer> {
        let control = self.control.upgrade().filter(|_| self.left == 0);
        control.map_or_else(Vec::new, |control| peers(&control, self.cuda))
    }
}

fn reached(control: &ControlBlock, rank: Rank, cuda: bool) -> (u64, Option<u64>) {
    // Without a GPU, the memory of the launch log is not reserved, and reading it would allocate
    // it.
    (control.collective(rank), cuda.then(|| launch_log::launched(control, rank)))
}

fn place(control: &ControlBlock, rank: Rank) -> DumpMember {
    let (shown, pid) = (control.display_rank(rank).0, control.pid(rank));
    DumpMember { rank: shown, global_rank: control.global(rank), pid }
}

fn peers(control: &ControlBlock, cuda: bool) -> Vec<DumpPeer> {
    let peer = |rank: Rank| {
        let (begun, launched) = reached(control, rank, cuda);
        let process = process::state(control.pid(rank));
        // Another rank may have reported an exit that this rank's watcher has yet to see.
        let over = || process.is_none_or(|state| state == "exited").then(|| "has ended".into());
        DumpPeer {
            place: place(control, rank),
            process,
            begun,
            launched,
            absence: control.exit_reason(rank).or_else(over),
        }
    };
    control.ranks().map(peer).collect()
}

#[derive(Default)]
pub(super) struct Registry {
    records: Vec<GroupRecord>,
    next: u64,
}

impl Registry {
    /// Adds a group and returns its number in this process.
    pub(super) fn add(&mut self, control: &Arc<ControlBlock>, timeout: Duration) -> u64 {
        self.next += 1;
        self.records.push(GroupRecord {
            id: self.next,
            memory: control.segment().identity(),
            name: control.name().into(),
            rank: control.rank(),
            members: control.ranks().map(|rank| place(control, rank)).collect(),
            global_ranks: control.global_ranks(),
            other_nodes: None,
            late_nodes: None,
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

    fn find(&mut self, id: u64) -> Option<&mut GroupRecord> {
        self.records.iter_mut().find(|record| record.id == id)
    }

    /// Records that the group spans further nodes, which `others` names; `life` is the id that all
    /// its ranks share.
    pub(super) fn note_nodes(&mut self, id: u64, life: u64, others: String) {
        if let Some(record) = self.find(id) {
            (record.other_nodes, record.memory) = (Some(others), life);
        }
    }

    /// Records the timeout of the group's calls.
    pub(super) fn set_timeout(&mut self, id: u64, timeout: Duration) {
        if let Some(record) = self.find(id) {
            record.timeout_ms = super::milliseconds(timeout);
        }
    }

    /// Records that collective `sequence` waits for `nodes`.
    pub(super) fn note_late(&mut self, id: u64, sequence: u64, nodes: String) {
        if let Some(record) = self.find(id) {
            record.late_nodes = Some((sequence, nodes));
        }
    }

    /// Records that the group has used a GPU.
    pub(super) fn note_cuda(&mut self, id: u64) {
        if let Some(record) = self.find(id) {
            record.cuda = true;
        }
    }

    /// Records that the group has failed.
    pub(super) fn note_failure(&mut self, id: u64, control: &ControlBlock, error: &Error) {
        if let Some(record) = self.find(id)
            && record.failure.is_none()
        {
            let peers = peers(control, record.cuda);
            record.failure = Some(ObservedFailure {
                kind: error.kind,
                message: error.message.clone(),
                at: clock::now(),
                peers,
            });
        }
    }

    /// Records that the group was left.
    pub(super) fn leave(&mut self, id: u64) {
        let Some(record) = self.find(id).filter(|record| record.left == 0) else { return };
        record.last = record.last();
        record.left = clock::now();
        record.control = Weak::new();
        let left = |record: &&GroupRecord| record.left != 0;
        if self.records.iter().filter(left).count() > LEFT
            && let Some(oldest) = self
                .records
                .iter()
                .filter(left)
                .min_by_key(|record| record.left)
                .map(|record| record.id)
        {
            self.records.retain(|record| record.id != oldest);
        }
    }

    /// Returns how the process of a global rank has ended, if an open group of this process knows
    /// it: "rank 3 (pid 77) of group \"default\" has ended (exited with code 1)".
    pub(super) fn ended(&self, global: u32) -> Option<String> {
        let open = self.records.iter().filter(|record| record.left == 0);
        open.filter_map(|record| record.control.upgrade())
            .filter(|control| control.any_ended())
            .find_map(|control| {
                let rank = control.ranks().find(|&rank| control.global(rank) == global)?;
                Some(format!(
                    "{} of group \"{}\" {}",
                    control.describe(rank),
                    control.name(),
                    control.ended(rank)?
                ))
            })
    }

    /// Returns the open groups that have failed because of a peer: the name of each, the ranks of
    /// its members in the default group, and the failure.
    pub(super) fn peer_failures(&self) -> Vec<(String, Vec<u32>, Error)> {
        let open = self.records.iter().filter(|record| record.left == 0);
        open.filter_map(|record| {
            let control = record.control.upgrade()?;
            let failure = control.failure().or_else(|| control.dead())?;
            let of_peer = failure.kind == ErrorKind::Peer;
            of_peer.then(|| (record.name.clone(), record.global_ranks.clone(), failure))
        })
        .collect()
    }

    /// Returns the records of all known groups, in the order in which they were joined.
    pub(super) fn records(&self) -> Vec<GroupRecord> {
        self.records.clone()
    }
}
