//! Costs of links: the cost model of `torch.distributed.tensor._collective_utils`, and the assumed
//! speed of each kind of link before anything is measured. Pure.
//!
//! The cost of a collective also depends on its algorithm, which this module does not know; see
//! `coll::cost`.

use super::Topology;
use super::device::NvlinkVersion;

/// A link between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Rate at which a rank sends, in 10⁹ bytes per second; in torch's model, in 2³⁰ bytes.
    pub gb_per_s: f64,
    /// Latency of a trip in µs.
    pub us: f64,
}

/// Bandwidth within a node in torch's model, in GiB/s.
const TORCH_GB_PER_S: f64 = 87.7;
/// Bandwidth between nodes in torch's model, as a fraction of the bandwidth within a node.
const TORCH_BETWEEN_NODES: f64 = 0.22;
/// Latency of a hop in torch's model in µs, within a node and between nodes.
const TORCH_HOP_US: [f64; 2] = [0.6, 2.7];
/// Fixed cost of a call in torch's model in µs, before the first hop.
const TORCH_BASE_US: f64 = 6.6;
/// Amount in µs that torch adds to the cost of an all-to-all, so that it prefers an all-gather of
/// the same price.
const TORCH_ALL_TO_ALL_US: f64 = 1.0;

/// Returns the links that torch's model assigns to the dimensions of a mesh of shape `ranks`, on
/// nodes with `per_node` devices.
pub fn torch_links(ranks: &[usize], per_node: usize) -> Vec<LinkCost> {
    let mut links = vec![LinkCost { gb_per_s: TORCH_GB_PER_S, us: TORCH_HOP_US[0] }; ranks.len()];
    let mut total: usize = 1;
    for (link, &size) in links.iter_mut().zip(ranks).rev() {
        total = total.saturating_mul(size);
        if total > per_node {
            link.gb_per_s *= TORCH_BETWEEN_NODES;
            link.us = TORCH_HOP_US[1];
        }
    }
    links
}

/// Returns the cost of a ring of `ranks` by torch's formula, `6.6 + hops × µs + (GiB × hops /
/// ranks) / (GiB/s) × 10⁶`, with torch's order of operations, so that every bit is equal. `rounds`
/// is 2 for an all-reduce, otherwise 1.
pub fn torch_ring(bytes: f64, ranks: usize, rounds: usize, link: LinkCost) -> f64 {
    let hops = (rounds * (ranks - 1)) as f64;
    let latency = TORCH_BASE_US + hops * link.us;
    // Exact, like every division by a power of two; torch's callers divide by 1024 three times.
    let gb = bytes / f64::from(1 << 30);
    latency + (gb * hops / ranks as f64) / link.gb_per_s * 1e6
}

/// Returns torch's cost of an all-to-all of tensors of `bytes`.
pub fn torch_all_to_all(bytes: f64, ranks: usize, link: LinkCost) -> f64 {
    torch_ring(bytes, ranks, 1, link) + TORCH_ALL_TO_ALL_US
}

/// Returns the cost of a broadcast, which torch's model lacks: a pipeline sends everything over
/// every link.
pub fn torch_broadcast(bytes: f64, ranks: usize, link: LinkCost) -> f64 {
    let hops = (ranks - 1) as f64;
    TORCH_BASE_US + hops * link.us + bytes / f64::from(1 << 30) / link.gb_per_s * 1e6
}

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// NVLinks, either between every two GPUs or to a switch.
    NvLink {
        /// Minimum number of NVLinks between two of the GPUs.
        links: u32,
        /// The oldest version among the GPUs.
        version: Option<NvlinkVersion>,
    },
    /// Peer access over PCIe.
    Pcie,
    /// GPUs that cannot access each other's memory.
    HostMemory,
    /// CPU tensors of processes on one node.
    SharedMemory,
    /// GPUs on different nodes.
    Network,
    /// CPU tensors on different nodes: TCP.
    Sockets,
}

/// The usable fraction of NVLink's nominal rate: 370 of 450 GB/s on H200 (2026-11-20, copy engines
/// of 8 GPUs, all at once).
const NVLINK_USABLE: f64 = 0.82;

impl LinkKind {
    /// Returns the worst connection between two of the GPUs in `detected`; `None` if there are no
    /// GPUs.
    pub fn between(detected: &Topology) -> Option<Self> {
        let n = detected.gpus.len();
        if n == 0 {
            return None;
        }
        let pairs = || (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
        let links = pairs().map(|(a, b)| detected.mesh.links(a, b)).min().unwrap_or(0);
        Some(if links > 0 {
            Self::NvLink { links, version: detected.gpus.iter().filter_map(|gpu| gpu.nvlink).min() }
        } else if pairs().all(|(a, b)| detected.peers.at(a, b)) {
            Self::Pcie
        } else {
            Self::HostMemory
        })
    }

    /// Returns the assumed speed of the connection, which was not measured on this machine.
    pub fn link(self) -> LinkCost {
        match self {
            Self::NvLink { links, version } => LinkCost {
                gb_per_s: NVLINK_USABLE * f64::from(links) * per_nvlink(version),
                us: 0.6,
            },
            // 16 lanes of PCIe 4 nominally carry 31.5 GB/s.
            Self::Pcie => LinkCost { gb_per_s: 25.0, us: 1.0 },
            // Data are written to host memory and read from there.
            Self::HostMemory => LinkCost { gb_per_s: 12.0, us: 1.5 },
            // An all-reduce of 16 MB among 4 ranks sends 24 MB in 2.7 ms (README, 2026-11-21,
            // 4-core EPYC).
            Self::SharedMemory => LinkCost { gb_per_s: 9.0, us: 0.3 },
            // As in torch's model.
            Self::Network => {
                LinkCost { gb_per_s: TORCH_GB_PER_S * TORCH_BETWEEN_NODES, us: TORCH_HOP_US[1] }
            }
            // The rate is nominal: 10 Gb/s for all ranks of a node. The latency is half of a
            // message's round trip (docs/measurements/cpu.md, 2026-11-24).
            Self::Sockets => LinkCost { gb_per_s: 1.25, us: 135.0 },
        }
    }
}

/// Returns the nominal rate of a link in one direction in GB/s, from NVIDIA's data sheets.
fn per_nvlink(version: Option<NvlinkVersion>) -> f64 {
    match version {
        Some(NvlinkVersion(0..=1, _)) => 20.0,
        Some(NvlinkVersion(2..=4, _)) | None => 25.0,
        Some(NvlinkVersion(5, _)) => 50.0,
        Some(NvlinkVersion(6.., _)) => 100.0,
    }
}

impl std::fmt::Display for LinkKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NvLink { links, version: Some(version) } => {
                write!(f, "NVLink {version} x {links}")
            }
            Self::NvLink { links, version: None } => write!(f, "NVLink x {links}"),
            Self::Pcie => f.write_str("PCIe"),
            Self::HostMemory => f.write_str("host memory"),
            Self::SharedMemory => f.write_str("shared memory"),
            Self::Network => f.write_str("network"),
            Self::Sockets => f.write_str("network (TCP, 10 Gb/s)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::TopologySource;
    use crate::topo::device::{Gpu, Mig, PciAddress, Uuid};
    use crate::topo::mesh::NvlMesh;
    use crate::topo::square::Square;

    fn gpus(links: &[Vec<u32>], version: Option<NvlinkVersion>, peers: bool) -> Topology {
        let n = links.len();
        let gpu = |number: usize| Gpu {
            uuid: Uuid::new(&number.to_string()),
            bus: PciAddress { domain: 0, bus: number as u8, device: 0 },
            name: "NVIDIA H200".into(),
            numa: None,
            path: None,
            nvlink: version,
            mig: Mig::Off,
        };
        let peers = Square::from_pairs(n, |a, b| a == b || peers);
        Topology::new(
            TopologySource::Absent("a test".into()),
            (0..n).map(gpu).collect(),
            NvlMesh::new(links).expect("right"),
            peers,
        )
    }

    #[test]
    fn torch_has_these_numbers() {
        // Printed by torch 2.11 for meshes (2, 4) on nodes of 4 devices;
        // tests/python/test_cost_model.py compares with torch itself.
        let links = torch_links(&[2, 4], 4);
        assert_eq!(
            links,
            [LinkCost { gb_per_s: 87.7 * 0.22, us: 2.7 }, LinkCost { gb_per_s: 87.7, us: 0.6 }]
        );
        assert_eq!(torch_ring(0.0, 4, 1, links[1]), 6.6 + 3.0 * 0.6);
        assert_eq!(
            torch_ring(f64::from(1 << 30), 2, 2, links[0]),
            6.6 + 2.0 * 2.7 + 1.0 / (87.7 * 0.22) * 1e6
        );
        assert_eq!(torch_all_to_all(5e6, 4, links[1]), torch_ring(5e6, 4, 1, links[1]) + 1.0);
        assert!(torch_broadcast(1e9, 4, links[1]) > torch_ring(1e9, 4, 1, links[1]));
    }

    #[test]
    fn the_worst_pair_decides() {
        let full =
            |links: u32| vec![vec![0, links, links], vec![links, 0, links], vec![links, links, 0]];
        let way =
            LinkKind::between(&gpus(&full(18), Some(NvlinkVersion(4, 0)), true)).expect("GPUs");
        assert_eq!(
            (way.to_string().as_str(), way.link().gb_per_s.round()),
            ("NVLink 4.0 x 18", 369.0)
        );
        let lame = vec![vec![0, 4, 4], vec![4, 0, 2], vec![4, 2, 0]];
        assert_eq!(
            LinkKind::between(&gpus(&lame, None, true)),
            Some(LinkKind::NvLink { links: 2, version: None })
        );
        assert_eq!(LinkKind::between(&gpus(&full(0), None, true)), Some(LinkKind::Pcie));
        assert_eq!(LinkKind::between(&gpus(&full(0), None, false)), Some(LinkKind::HostMemory));
        assert_eq!(LinkKind::between(&gpus(&[], None, true)), None);
    }

    #[test]
    fn nearer_ways_are_faster() {
        let way =
            |version: u8| LinkKind::NvLink { links: 18, version: Some(NvlinkVersion(version, 0)) };
        let order = [way(6), way(5), way(4), LinkKind::Pcie, LinkKind::HostMemory];
        assert!(order.windows(2).all(|pair| pair[0].link().gb_per_s > pair[1].link().gb_per_s));
    }
}
