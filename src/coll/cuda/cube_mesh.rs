//! The edges of a group whose GPUs form a hybrid cube mesh.

use super::arguments::PerRank;
use super::workspace::layout::{Channel, ChannelLayout};
use super::workspace::memory::{PeerInfo, PeerWorkspaces};
use crate::topo::{self, graph::CubeMesh};

/// Number of ranks of a group whose GPUs form a hybrid cube mesh.
pub(super) const RANKS: usize = 8;
/// Length of an encoded mesh.
pub(super) const BYTES: usize = 2 + RANKS;

/// A group's edges, and the memory through which its kernels use them.
pub(super) struct Edges {
    pub(super) mesh: CubeMesh,
    /// Memory that only neighbours map, for groups that otherwise use host memory because not all
    /// GPUs can access each other. The offset of a channel's LL lines does not depend on the size
    /// of the memory, so the group's layout also applies here.
    pub(super) apart: Option<(PeerWorkspaces, ChannelLayout)>,
}

impl Edges {
    /// Returns the memory of `channel` on this rank and its neighbours; 0 for all others. `peer` is
    /// the memory that the group's other kernels use.
    pub(super) fn reach(&self, me: usize, channel: Channel, peer: &PerRank) -> PerRank {
        let apart = self
            .apart
            .as_ref()
            .map(|(memory, layout)| (memory.addresses(), layout.channel(channel) as u64));
        let mut along = [0; _];
        for rank in (0..RANKS).filter(|&rank| reaches(&self.mesh, me, rank)) {
            along[rank] = apart.as_ref().map_or(peer[rank], |(bases, offset)| bases[rank] + offset);
        }
        along
    }
}

/// Returns true if `rank` is `me` or shares an edge with it.
pub(super) fn reaches(mesh: &CubeMesh, me: usize, rank: usize) -> bool {
    mesh.relay[me] as usize == rank || mesh.quad_of(me as u32).contains(&(rank as u32))
}

/// Returns the mesh of the group's GPUs in rank order, if this rank detects one.
pub(super) fn detected(peers: &[PeerInfo]) -> Option<CubeMesh> {
    let uuids: Vec<String> = peers.iter().map(|peer| spelled(&peer.uuid)).collect();
    match topo::connectivity_of(&uuids) {
        Ok(mesh) => CubeMesh::of(&mesh),
        Err(error) => {
            log::debug!("how the GPUs are linked is not known: {error}");
            None
        }
    }
}

/// Formats a UUID as NVML does.
fn spelled(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Encodes a mesh for comparison: equal bytes if and only if the meshes are equal.
pub(super) fn encoded(mesh: Option<&CubeMesh>) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    if let Some(mesh) = mesh {
        bytes[0] = 1;
        bytes[1] = mesh.quad[0].iter().map(|rank| 1 << rank).sum();
        bytes[2..].copy_from_slice(&mesh.relay.map(|rank| rank as u8));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(relay: [u32; 8]) -> CubeMesh {
        CubeMesh { quad: [[0, 1, 2, 3], [4, 5, 6, 7]], relay }
    }

    #[test]
    fn uuids_are_spelled_as_nvml_does() {
        let uuid = [0x1b, 0x3c, 0x5d, 0x7e, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0xff];
        assert_eq!(spelled(&uuid), "GPU-1b3c5d7e-0001-0203-0405-060708090aff");
    }

    #[test]
    fn different_meshes_are_told_apart() {
        let (straight, crossed) = (mesh([4, 5, 6, 7, 0, 1, 2, 3]), mesh([7, 5, 6, 4, 3, 1, 2, 0]));
        let other = CubeMesh { quad: [[0, 1, 2, 4], [3, 5, 6, 7]], relay: straight.relay };
        let encodings = [None, Some(&straight), Some(&crossed), Some(&other)].map(encoded);
        for (i, one) in encodings.iter().enumerate() {
            assert!(
                one.len() == BYTES && encodings[i + 1..].iter().all(|other| other != one),
                "{encodings:?}"
            );
        }
    }

    #[test]
    fn only_neighbours_are_reached() {
        let edges = Edges { mesh: mesh([4, 5, 6, 7, 0, 1, 2, 3]), apart: None };
        let mut peer = [0; _];
        (0..RANKS).for_each(|rank| peer[rank] = 100 + rank as u64);
        assert_eq!(
            edges.reach(2, Channel::Collectives, &peer)[..RANKS],
            [100, 101, 102, 103, 0, 0, 106, 0]
        );
        assert_eq!(
            edges.reach(7, Channel::Transfers, &peer)[..RANKS],
            [0, 0, 0, 103, 104, 105, 106, 107]
        );
    }

    #[test]
    fn low_latency_lines_lie_alike_in_little_and_much_memory() {
        let (little, much) = [64, 1024]
            .map(|mebibytes| ChannelLayout::new(RANKS, mebibytes << 20).expect("fits"))
            .into();
        assert_eq!((little.ll_epochs(), little.ll_lines()), (much.ll_epochs(), much.ll_lines()));
        assert_eq!(little.sentinel(), much.sentinel());
    }
}
