//! The record that each rank publishes in the store, and the check that all records agree. Pure.

use crate::error::{Error, ErrorKind, Result};
use crate::node_map::{RankLocation, apart};
use crate::rank::{Rank, name_ranks};
use crate::sys::node_id::NodeId;
use crate::sys::process::ProcessId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Display;

/// Version of the joining protocol; changes with the record, the messages and the layout of the
/// memory.
pub(super) const PROTOCOL: u32 = 3;

/// Version of torch-symm.
pub(super) const VERSION: &str = env!("TORCH_SYMM_VERSION");

/// The record of one rank, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct JoinRecord {
    pub(super) protocol: u32,
    pub(super) version: String,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) segment_bytes: u64,
    /// Members in rank order, by their ranks in the default group; empty if the caller did not list
    /// them.
    pub(super) global_ranks: Vec<i32>,
    /// Name of the order in which reductions combine the ranks' elements.
    pub(super) order: String,
    pub(super) node: NodeId,
    /// Name of the node, only for messages.
    pub(super) host_name: String,
    /// True if the rank accepts a group that spans nodes.
    pub(super) multi_node: bool,
    pub(super) pid: u32,
    pub(super) start_time: u64,
    pub(super) uid: u32,
    /// When the record was published or the failure added, in nanoseconds since boot.
    pub(super) at: u64,
    /// Abstract name of the socket on which rank 0 listens; empty on other ranks.
    pub(super) socket: String,
    /// A random number; rank 0's is the group's token.
    pub(super) nonce: [u8; 16],
    /// Why this rank cannot join.
    pub(super) failure: Option<RecordedError>,
}

/// An [`Error`] in the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RecordedError {
    kind: u8,
    message: String,
}

impl RecordedError {
    /// Returns the error for the other ranks.
    pub(super) fn error(&self) -> Error {
        Error {
            kind: ErrorKind::from_peer(self.kind).unwrap_or(ErrorKind::Internal),
            message: self.message.clone(),
        }
    }
}

impl JoinRecord {
    pub(super) fn process(&self) -> ProcessId {
        ProcessId { pid: self.pid, start_time: self.start_time }
    }

    /// Returns the location of the rank.
    pub(super) fn placement(&self) -> RankLocation {
        let name = if self.node.test.is_empty() { &self.host_name } else { &self.node.test };
        RankLocation { node: self.node.clone(), name: name.clone(), pid: self.pid }
    }

    pub(super) fn fail(&mut self, error: &Error) {
        self.failure =
            Some(RecordedError { kind: error.kind as u8, message: error.message.clone() });
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| Error::internal(format!("a record cannot be written: {error}")))
    }

    /// Decodes the value under `rank`'s key.
    pub(super) fn decode(rank: Rank, bytes: &[u8]) -> Result<Self> {
        /// The version, which is part of the records of all protocols.
        #[derive(Deserialize)]
        struct Version {
            protocol: u32,
            version: String,
        }
        serde_json::from_slice::<Self>(bytes)
            .map_err(|error| error.to_string())
            .and_then(|record| {
                if record.rank == rank.0 {
                    Ok(record)
                } else {
                    Err(format!("it says rank {}", record.rank))
                }
            })
            .map_err(|reason| match serde_json::from_slice::<Version>(bytes) {
                Ok(Version { protocol, version }) if protocol != PROTOCOL => {
                    Error::config(format!(
                        "rank {rank} runs torch-symm {version} (protocol {protocol}), \
                     others {VERSION} (protocol {PROTOCOL})"
                    ))
                }
                _ => Error::config(format!(
                    "the record of rank {rank} in the store cannot be read: {reason}"
                )),
            })
    }
}

/// Checks that `records`, in rank order, can form the group; the error names the ranks that differ
/// from the first, and how. The ranks may be on several nodes if all of them accept that; each node
/// then forms a group of its own.
pub(super) fn agree(group: &str, records: &[&JoinRecord]) -> Result<()> {
    let Some((first, rest)) = records.split_first() else {
        return Ok(());
    };
    let differing = |differs: &dyn Fn(&JoinRecord) -> bool| {
        let others: Vec<&JoinRecord> =
            rest.iter().copied().filter(|record| differs(record)).collect();
        let example = *others.first()?;
        let mut ranks = vec![Rank(first.rank)];
        ranks.extend(others.iter().map(|record| Rank(record.rank)));
        Some((name_ranks(&ranks), example))
    };
    if let Some((ranks, other)) =
        differing(&|record| (record.protocol, &record.version) != (first.protocol, &first.version))
    {
        return Err(Error::config(format!(
            "{ranks} run different versions of torch-symm: rank {} has {} (protocol {}), rank {} \
             {} (protocol {})",
            first.rank, first.version, first.protocol, other.rank, other.version, other.protocol
        )));
    }
    if let Some((ranks, other)) = differing(&|record| record.size != first.size) {
        return Err(Error::config(format!(
            "{ranks} disagree on the size of group {group:?}: rank {} says {} ranks, rank {} {}",
            first.rank, first.size, other.rank, other.size
        )));
    }
    if let Some((ranks, other)) = differing(&|record| record.order != first.order) {
        return Err(Error::config(format!(
            "{ranks} disagree on the order of sums of group {group:?}: rank {} has order={:?}, \
             rank {} order={:?}; give \
             torch_symm.Options(order=...) or SYMM_ORDER the same value on all ranks",
            first.rank, first.order, other.rank, other.order
        )));
    }
    // The lists are compared before the nodes, because ranks with different lists may be on any
    // node. A rank without a list agrees with every list.
    if let Some(first) = records.iter().find(|record| !record.global_ranks.is_empty())
        && let Some(other) = records.iter().find(|record| {
            !record.global_ranks.is_empty() && record.global_ranks != first.global_ranks
        })
    {
        return Err(other_members(
            group,
            (first.rank, &name_members(&first.global_ranks)),
            (other.rank, &name_members(&other.global_ranks)),
        ));
    }
    if let Some((ranks, other)) = differing(&|record| record.node != first.node) {
        let Some(refuses) = records.iter().find(|record| !record.multi_node) else { return Ok(()) };
        let reason = apart((first.rank, &first.placement()), (other.rank, &other.placement()));
        return Err(Error::config(format!(
            "{ranks} {reason}; rank {} has SYMM_INTER_NODE_BACKEND=none or \
             inter_node_backend=\"none\", auto on all ranks connects nodes",
            refuses.rank
        )));
    }
    if let Some((ranks, other)) = differing(&|record| record.uid != first.uid) {
        return Err(Error::config(format!(
            "{ranks} run as different users: rank {} as {}, rank {} as {}",
            first.rank, first.uid, other.rank, other.uid
        )));
    }
    if let Some((ranks, other)) = differing(&|record| record.segment_bytes != first.segment_bytes) {
        return Err(Error::config(format!(
            "{ranks} disagree on the shared memory of group {group:?}: rank {} says {} \
             bytes, rank {} {}",
            first.rank, first.segment_bytes, other.rank, other.segment_bytes
        )));
    }
    Ok(())
}

/// Number of members that a message names at each end of a long list.
const NAMED: usize = 8;

/// Lists the members of a group by their ranks in the default group. A long list is shortened, with
/// a digest that distinguishes lists.
pub fn name_members(global_ranks: &[i32]) -> String {
    let named = |ranks: &[i32]| ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    if global_ranks.len() <= 2 * NAMED {
        return format!("[{}]", named(global_ranks));
    }
    let (head, tail) =
        (named(&global_ranks[..NAMED]), named(&global_ranks[global_ranks.len() - NAMED..]));
    let digest = Sha256::digest(
        global_ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect::<Vec<u8>>(),
    );
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("[{head}, ..., {tail}] ({} ranks, digest {digest})", global_ranks.len())
}

/// Returns the error of two ranks that list different members of `group`; each list has the form
/// that `name_members` gives it.
pub fn other_members(
    group: &str,
    (first, here): (impl Display, &str),
    (other, there): (impl Display, &str),
) -> Error {
    Error::config(format!(
        "ranks disagree on the members of group {group:?}, by their ranks in the default group: \
         its rank {first} lists {here}, \
         its rank {other} {there}; give all of them the same list, or another group name"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rank: u32) -> JoinRecord {
        let host = NodeId {
            boot: "b".into(),
            ipc: "i".into(),
            net: "n".into(),
            pid: "p".into(),
            user: "u".into(),
            time: "t".into(),
            ..NodeId::default()
        };
        JoinRecord {
            protocol: PROTOCOL,
            version: VERSION.into(),
            rank,
            size: 4,
            segment_bytes: 4096,
            global_ranks: Vec::new(),
            order: "rank".into(),
            node: host,
            host_name: "here".into(),
            multi_node: false,
            pid: 100 + rank,
            start_time: 7,
            uid: 0,
            at: 1,
            socket: String::new(),
            nonce: [rank as u8; 16],
            failure: None,
        }
    }

    #[test]
    fn records_survive_the_store() -> Result<()> {
        let mut written = record(2);
        written.fail(&Error::timeout("too late"));
        let read = JoinRecord::decode(Rank(2), &written.encode()?)?;
        assert_eq!(read, written);
        assert_eq!(read.failure.map(|failure| failure.error()), Some(Error::timeout("too late")));
        // Fuzzing starts with a record of this protocol.
        assert_eq!(
            JoinRecord::decode(Rank(0), include_bytes!("../../fuzz/seeds/join/record.json"))?
                .protocol,
            PROTOCOL
        );
        Ok(())
    }

    #[test]
    fn unreadable_records_are_refused_by_name() {
        let cases: [(&[u8], &str); 4] = [
            (b"", "the record of rank 1 in the store cannot be read"),
            (b"{\"protocol\":1}", "the record of rank 1 in the store cannot be read"),
            (
                b"{\"protocol\":9,\"version\":\"3.0\"}",
                "rank 1 runs torch-symm 3.0 (protocol 9), others",
            ),
            (&record(3).encode().expect("encodes"), "it says rank 3"),
        ];
        for (bytes, expected) in cases {
            let error = JoinRecord::decode(Rank(1), bytes).expect_err("refused");
            error.assert_says(ErrorKind::Config, &[expected]);
        }
    }

    #[test]
    fn disagreements_name_ranks_and_values() {
        type Change = fn(&mut JoinRecord);
        let cases: [(Change, &str); 12] = [
            (
                |r| r.version = "9.9".into(),
                concat!(
                    "ranks 0, 2 and 3 run different versions of torch-symm: rank 0 has ",
                    env!("TORCH_SYMM_VERSION")
                ),
            ),
            (|r| r.protocol = 7, "(protocol 7)"),
            (
                |r| r.node.boot = "c".into(),
                "ranks 0, 2 and 3 run on different nodes (\"here\", which have booted apart); rank \
                 0 has SYMM_INTER_NODE_BACKEND=none",
            ),
            (
                |r| r.node.test = "b".into(),
                "run on different nodes (\"here\" and \"b\", by SYMM_TEST_NODE); rank 0 has \
                 SYMM_INTER_NODE_BACKEND=none or inter_node_backend=\"none\", auto",
            ),
            (
                |r| (r.node.pid, r.node.ipc) = ("q".into(), "j".into()),
                "ranks 0, 2 and 3 run in different containers of one node (\"here\"): rank 2 has \
                 another pid, ipc namespaces than rank 0; \
                 start the containers with --pid=host --ipc=host, or all ranks in one",
            ),
            (
                |r| r.node.net = "m".into(),
                "rank 2 has another net namespace than rank 0; start the containers with \
                 --network=host, or all",
            ),
            (
                |r| r.node.time = "s".into(),
                "rank 2 has another time namespace than rank 0; start them in one",
            ),
            (|r| r.uid = 5, "ranks 0, 2 and 3 run as different users: rank 0 as 0, rank 2 as 5"),
            (
                |r| (r.node.boot, r.order) = ("c".into(), "tree".into()),
                "ranks 0, 2 and 3 disagree on the order of sums of group \"g\": rank 0 has \
                 order=\"rank\", rank 2 order=\"tree\"; give",
            ),
            (|r| r.size = 8, "disagree on the size of group \"g\": rank 0 says 4 ranks, rank 2 8"),
            (
                |r| (r.node.boot, r.global_ranks) = ("c".into(), vec![2, 3, 8, 9]),
                "ranks disagree on the members of group \"g\", by their ranks in the default \
                 group: its rank 0 lists [0, 1, 2, 3], \
                 its rank 2 [2, 3, 8, 9]; give",
            ),
            (
                |r| r.segment_bytes = 8,
                "disagree on the shared memory of group \"g\": rank 0 says 4096 bytes, rank 2 8",
            ),
        ];
        let good: Vec<JoinRecord> = (0..4)
            .map(|rank| JoinRecord { global_ranks: vec![0, 1, 2, 3], ..record(rank) })
            .collect();
        assert_eq!(agree("g", &good.iter().collect::<Vec<_>>()), Ok(()));
        assert_eq!(agree("g", &[]), Ok(()));
        for (change, expected) in cases {
            let mut bad = good.clone();
            change(&mut bad[2]);
            change(&mut bad[3]);
            let error = agree("g", &bad.iter().collect::<Vec<_>>()).expect_err("refused");
            error.assert_says(ErrorKind::Config, &[expected]);
        }
    }

    #[test]
    fn ranks_without_a_list_agree_with_every_list() {
        let listed =
            |rank, listed: &[i32]| JoinRecord { global_ranks: listed.to_vec(), ..record(rank) };
        let [plain, first, other] = [record(0), listed(1, &[4, 5, 6]), listed(2, &[4, 5, 7])];
        assert_eq!(agree("g", &[&plain, &first, &first]), Ok(()));
        let error = agree("g", &[&plain, &first, &other]).expect_err("refused");
        assert!(
            error.message.contains("its rank 1 lists [4, 5, 6], its rank 2 [4, 5, 7]"),
            "{error}"
        );
    }

    #[test]
    fn long_lists_that_differ_have_different_names() {
        let mut members: Vec<i32> = (0..1000).collect();
        assert!(
            name_members(&members[..2 * NAMED]).ends_with(", 14, 15]"),
            "short lists are whole"
        );
        let before = name_members(&members);
        assert!(
            before.starts_with("[0, 1, 2, 3, 4, 5, 6, 7, ..., 992, ") && before.len() < 160,
            "{before}"
        );
        members[500] = 2000;
        assert_ne!(name_members(&members), before);
    }

    #[test]
    fn nodes_that_may_be_connected_need_not_agree_on_memory_or_users() {
        let mut far = JoinRecord { uid: 5, segment_bytes: 8, multi_node: true, ..record(1) };
        far.node.boot = "c".into();
        let here = JoinRecord { multi_node: true, ..record(0) };
        assert_eq!(agree("g", &[&here, &far]), Ok(()));
        assert!(
            agree("g", &[&here, &far, &record(2)]).is_err_and(|error| error
                .message
                .contains("rank 2 has SYMM_INTER_NODE_BACKEND=none"))
        );
        assert_eq!(far.placement().name, "here");
        far.node.test = "b".into();
        assert_eq!((far.placement().name.as_str(), far.placement().pid), ("b", 101));
        far.size = 8;
        assert!(
            agree("g", &[&here, &far])
                .is_err_and(|error| error.message.contains("disagree on the size"))
        );
    }
}
