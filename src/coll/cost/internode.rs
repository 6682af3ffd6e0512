//! Dimensions that span nodes: the links between nodes, and their traffic. Pure, except for the
//! query of this node's GPUs.

use super::hardware::DeviceKind;
use super::network::HEADER_SLOT_BYTES;
use super::network::NetworkProfile;
use super::{InternodeDim, Mesh};
use crate::coll::call::Collective;
use crate::config::Config;
use crate::error::Result;
use crate::topo;
use crate::topo::cost::{LinkCost, LinkKind};

/// Fixed cost of an inter-node call in µs, in addition to its trips (torch's constant).
const BASE_US: f64 = 6.6;
/// Approximate number of data bytes in a slot. Up to this length a call is one exchange of slots
/// (`src/internode/header_exchange.rs`).
const SHORT: f64 = (HEADER_SLOT_BYTES - 64) as f64;

/// Returns the link between the ranks of a node.
fn inside(device: DeviceKind) -> Result<LinkKind> {
    Ok(match device {
        DeviceKind::Cpu => LinkKind::SharedMemory,
        DeviceKind::Cuda if !Config::get().p2p => LinkKind::HostMemory,
        DeviceKind::Cuda => LinkKind::between(&topo::detect()?).unwrap_or(LinkKind::HostMemory),
    })
}

/// Returns the span of each dimension's groups over nodes: `None` while a dimension and all later
/// ones fit into one node.
pub(super) fn spans(mesh: &Mesh) -> Result<Vec<Option<InternodeDim>>> {
    let link = inside(mesh.device)?.link();
    let mut behind: usize = 1;
    let mut spans = vec![None; mesh.ranks.len()];
    for (span, &ranks) in spans.iter_mut().zip(&mesh.ranks).rev() {
        let total = behind.saturating_mul(ranks);
        if total > mesh.per_node {
            let locals = (mesh.per_node / behind.max(1)).clamp(1, ranks);
            let load = match mesh.device {
                DeviceKind::Cpu => (mesh.per_node / locals).clamp(1, behind.max(1)) as f64,
                DeviceKind::Cuda => 1.0 / locals as f64,
            };
            *span = Some(InternodeDim {
                nodes: ranks.div_ceil(locals),
                local_size: locals,
                load,
                intra_node: link,
            });
        }
        behind = total;
    }
    Ok(spans)
}

/// Returns the link of each dimension, intra-node or network, and a sentence for users that names
/// these links.
pub(super) fn detected(mesh: &Mesh) -> Result<(Vec<LinkCost>, String)> {
    let (near, far) = match mesh.device {
        DeviceKind::Cpu => (LinkKind::SharedMemory, LinkKind::Sockets),
        DeviceKind::Cuda => (inside(mesh.device)?, LinkKind::Network),
    };
    let ways: Vec<LinkKind> =
        spans(mesh)?.iter().map(|span| if span.is_some() { far } else { near }).collect();
    let names: Vec<String> = ways.iter().map(LinkKind::to_string).collect();
    Ok((
        ways.into_iter().map(LinkKind::link).collect(),
        format!("links as detected, nothing measured: {}", names.join(", ")),
    ))
}

/// Returns the detected link of each dimension. If `wire` is given, the dimensions that span nodes
/// get the measured network instead.
pub(super) fn known(mesh: &Mesh, wire: Option<&NetworkProfile>) -> Result<Vec<LinkCost>> {
    let (links, _) = detected(mesh)?;
    let measured = wire.map(|wire| LinkCost { gb_per_s: wire.gb_per_s, us: wire.us });
    let link = |(near, span): (LinkCost, Option<InternodeDim>)| {
        measured.filter(|_| span.is_some()).unwrap_or(near)
    };
    Ok(links.into_iter().zip(spans(mesh)?).map(link).collect())
}

impl InternodeDim {
    /// Returns the inter-node microseconds of `op` on tensors of `bytes` over `wire`, while all
    /// groups send.
    pub(super) fn us(&self, op: Collective, bytes: f64, wire: LinkCost) -> f64 {
        let nodes = self.nodes as f64;
        let share = (nodes - 1.0) / nodes;
        let sent = match op {
            Collective::AllReduce | Collective::AllReduceAddRmsNorm => 2.0 * share,
            Collective::AllGather | Collective::ReduceScatter => share,
            Collective::AllToAll => share * self.local_size as f64,
            Collective::Broadcast
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter => 1.0,
            Collective::Barrier => 0.0,
        };
        // A call is short if these tensors fit into a slot: of a reduction one per node, the sum of
        // its ranks; of any other call one per rank.
        let sums = op.reduces() || op == Collective::AllReduceAddRmsNorm;
        let ranks = if sums { 1 } else { self.local_size };
        let trips = if bytes * ranks as f64 <= SHORT { 1.0 } else { 2.0 };
        // 1 GB/s is 1000 bytes in a microsecond.
        BASE_US + trips * wire.us + self.load * sent * bytes / (wire.gb_per_s * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(ranks: &[usize], per_node: usize) -> Vec<Option<(usize, usize, f64)>> {
        let mesh = Mesh { device: DeviceKind::Cpu, ranks: ranks.to_vec(), job: per_node, per_node };
        let spans = spans(&mesh).expect("no GPU is looked at");
        spans
            .into_iter()
            .map(|span| span.map(|span| (span.nodes, span.local_size, span.load)))
            .collect()
    }

    #[test]
    fn groups_are_parted_as_ranks_fill_nodes() {
        assert_eq!(placed(&[2, 4], 4), [Some((2, 1, 4.0)), None]);
        assert_eq!(placed(&[8], 4), [Some((2, 4, 1.0))]);
        assert_eq!(placed(&[4, 2], 4), [Some((2, 2, 2.0)), None]);
        assert_eq!(
            placed(&[2, 2, 8], 4),
            [Some((2, 1, 4.0)), Some((2, 1, 4.0)), Some((2, 4, 1.0))]
        );
        assert_eq!(placed(&[2, 2], 4), [None, None]);
    }

    #[test]
    fn the_wire_carries_what_all_groups_of_a_node_send() {
        let span = InternodeDim {
            nodes: 2,
            local_size: 1,
            load: 4.0,
            intra_node: LinkKind::SharedMemory.link(),
        };
        let wire = LinkCost { gb_per_s: 1.0, us: 100.0 };
        assert_eq!(span.us(Collective::AllReduce, 0.0, wire), 106.6);
        assert_eq!(span.us(Collective::AllReduce, 1e6, wire), 206.6 + 4000.0);
        assert_eq!(span.us(Collective::AllGather, 1e6, wire), 206.6 + 2000.0);
        let whole = InternodeDim { local_size: 4, load: 1.0, ..span };
        assert_eq!(whole.us(Collective::AllToAll, 1e6, wire), 206.6 + 2000.0);
        // One exchange of slots suffices if a slot holds the node's data: of a reduction the sum of
        // its ranks, of a gather the data of each of its four ranks.
        assert_eq!(whole.us(Collective::ReduceScatter, 2000.0, wire), 106.6 + 1.0);
        assert_eq!(whole.us(Collective::AllGather, 1000.0, wire), 106.6 + 0.5);
        assert_eq!(whole.us(Collective::AllGather, 2000.0, wire), 206.6 + 1.0);
    }
}
