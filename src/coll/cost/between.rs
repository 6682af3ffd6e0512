//! Dimensions that span nodes: the links between nodes, and their traffic. Pure, except for the query of this node's
//! GPUs.

use super::hardware::Device;
use super::wire::Wire;
use super::{Mesh, Span};
use crate::coll::call::Op;
use crate::config::Config;
use crate::error::Result;
use crate::topo;
use crate::topo::cost::{Link, Way};

/// Fixed cost of an inter-node call in µs, in addition to its trips (torch's constant).
const BASE_US: f64 = 6.6;
/// Approximate number of bytes per rank up to which a call is one exchange of slots (`src/hosts/opening.rs`).
const SHORT: f64 = 960.0;

/// Returns the link between the ranks of a node.
fn inside(device: Device) -> Result<Way> {
    Ok(match device {
        Device::Cpu => Way::SharedMemory,
        Device::Cuda if !Config::get().p2p => Way::HostMemory,
        Device::Cuda => Way::between(&topo::detect()?).unwrap_or(Way::HostMemory),
    })
}

/// Returns the span of each dimension's groups over nodes: `None` while a dimension and all later ones fit into one
/// node.
pub(super) fn spans(mesh: &Mesh) -> Result<Vec<Option<Span>>> {
    let link = inside(mesh.device)?.link();
    let mut behind: usize = 1;
    let mut spans = vec![None; mesh.ranks.len()];
    for (span, &ranks) in spans.iter_mut().zip(&mesh.ranks).rev() {
        let total = behind.saturating_mul(ranks);
        if total > mesh.per_host {
            let locals = (mesh.per_host / behind.max(1)).clamp(1, ranks);
            let load = match mesh.device {
                Device::Cpu => (mesh.per_host / locals).clamp(1, behind.max(1)) as f64,
                Device::Cuda => 1.0 / locals as f64,
            };
            *span = Some(Span { hosts: ranks.div_ceil(locals), locals, load, inside: link });
        }
        behind = total;
    }
    Ok(spans)
}

/// Returns the link of each dimension, intra-node or network, and their names.
pub(super) fn detected(mesh: &Mesh) -> Result<(Vec<Link>, String)> {
    let (near, far) = match mesh.device {
        Device::Cpu => (Way::SharedMemory, Way::Sockets),
        Device::Cuda => (inside(mesh.device)?, Way::Network),
    };
    let ways: Vec<Way> = spans(mesh)?.iter().map(|span| if span.is_some() { far } else { near }).collect();
    let names: Vec<String> = ways.iter().map(Way::to_string).collect();
    Ok((ways.into_iter().map(Way::link).collect(), format!("links as detected, nothing measured: {}", names.join(", "))))
}

/// Returns the link of each dimension: as detected, but the network as measured if `wire` is given.
pub(super) fn known(mesh: &Mesh, wire: Option<&Wire>) -> Result<Vec<Link>> {
    let (links, _) = detected(mesh)?;
    let measured = wire.map(|wire| Link { gb_per_s: wire.gb_per_s, us: wire.us });
    let link = |(near, span): (Link, Option<Span>)| measured.filter(|_| span.is_some()).unwrap_or(near);
    Ok(links.into_iter().zip(spans(mesh)?).map(link).collect())
}

impl Span {
    /// Returns the inter-node microseconds of `op` on tensors of `bytes` over `wire`, while all groups send.
    pub(super) fn us(&self, op: Op, bytes: f64, wire: Link) -> f64 {
        let hosts = self.hosts as f64;
        let share = (hosts - 1.0) / hosts;
        let sent = match op {
            Op::AllReduce | Op::AllReduceAddRmsNorm => 2.0 * share,
            Op::AllGather | Op::ReduceScatter => share,
            Op::AllToAll => share * self.locals as f64,
            Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter => 1.0,
            Op::Barrier => 0.0,
        };
        let trips = if bytes * self.locals as f64 <= SHORT { 1.0 } else { 2.0 };
        // 1 GB/s is 1000 bytes in a microsecond.
        BASE_US + trips * wire.us + self.load * sent * bytes / (wire.gb_per_s * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(ranks: &[usize], per_host: usize) -> Vec<Option<(usize, usize, f64)>> {
        let mesh = Mesh { device: Device::Cpu, ranks: ranks.to_vec(), job: per_host, per_host };
        let spans = spans(&mesh).expect("no GPU is looked at");
        spans.into_iter().map(|span| span.map(|span| (span.hosts, span.locals, span.load))).collect()
    }

    #[test]
    fn groups_are_parted_as_ranks_fill_hosts() {
        assert_eq!(placed(&[2, 4], 4), [Some((2, 1, 4.0)), None]);
        assert_eq!(placed(&[8], 4), [Some((2, 4, 1.0))]);
        assert_eq!(placed(&[4, 2], 4), [Some((2, 2, 2.0)), None]);
        assert_eq!(placed(&[2, 2, 8], 4), [Some((2, 1, 4.0)), Some((2, 1, 4.0)), Some((2, 4, 1.0))]);
        assert_eq!(placed(&[2, 2], 4), [None, None]);
    }

    #[test]
    fn the_wire_carries_what_all_groups_of_a_host_send() {
        let span = Span { hosts: 2, locals: 1, load: 4.0, inside: Way::SharedMemory.link() };
        let wire = Link { gb_per_s: 1.0, us: 100.0 };
        assert_eq!(span.us(Op::AllReduce, 0.0, wire), 106.6);
        assert_eq!(span.us(Op::AllReduce, 1e6, wire), 206.6 + 4000.0);
        assert_eq!(span.us(Op::AllGather, 1e6, wire), 206.6 + 2000.0);
        let whole = Span { locals: 4, load: 1.0, ..span };
        assert_eq!(whole.us(Op::AllToAll, 1e6, wire), 206.6 + 2000.0);
    }
}
