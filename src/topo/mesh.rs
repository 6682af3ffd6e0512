//! The number of NVLinks between each pair of GPUs.

use super::device::PciAddress;
use super::square::Square;
use crate::error::{Error, Result};

/// The device at the far end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remote {
    /// The GPU at this address.
    Gpu(PciAddress),
    /// An NVSwitch. Its identity does not matter: all switches of a node are connected, and virtual
    /// machines hide their addresses.
    Switch,
    /// Some other device, or one that the driver does not report.
    Unknown,
}

/// The active links of one GPU, as it reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuLinks {
    /// The PCI address of the GPU itself.
    pub bus: PciAddress,
    /// The far end of each link.
    pub remotes: Vec<Remote>,
}

impl GpuLinks {
    fn to(&self, remote: Remote) -> u32 {
        self.remotes.iter().filter(|end| **end == remote).map(|_| 1).sum()
    }
}

/// NVLink counts between GPUs: symmetric, zero on the diagonal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvlMesh(Square<u32>);

impl NvlMesh {
    /// Makes a mesh of these counts; fails unless they are square, symmetric and zero on the
    /// diagonal.
    pub fn new(counts: &[Vec<u32>]) -> Result<Self> {
        let square = Square::new(counts)?;
        match (0..square.size()).find(|&gpu| square.at(gpu, gpu) != 0) {
            None => Ok(Self(square)),
            Some(gpu) => Err(Error::value(format!(
                "[{gpu}][{gpu}] is {}, but no GPU is linked to itself",
                square.at(gpu, gpu)
            ))),
        }
    }

    /// Builds the mesh that the GPUs report. A direct link counts if both of its ends report it.
    /// Two GPUs on switches can use as many links as the GPU with fewer of them has.
    pub fn observed(gpus: &[GpuLinks]) -> Self {
        Self(Square::from_pairs(gpus.len(), |a, b| {
            let (one, other) = (&gpus[a], &gpus[b]);
            if a == b || one.bus == other.bus {
                return 0;
            }
            let direct = one.to(Remote::Gpu(other.bus)).min(other.to(Remote::Gpu(one.bus)));
            direct + one.to(Remote::Switch).min(other.to(Remote::Switch))
        }))
    }

    /// Returns the number of GPUs.
    pub fn size(&self) -> usize {
        self.0.size()
    }

    /// Returns the number of links between `a` and `b`.
    ///
    /// # Panics
    /// If one of them is not below `size`.
    pub fn links(&self, a: usize, b: usize) -> u32 {
        self.0.at(a, b)
    }

    /// Returns true if `a` and `b` are linked.
    pub fn linked(&self, a: usize, b: usize) -> bool {
        self.links(a, b) > 0
    }

    /// Returns the mesh of the GPUs in `order`. A GPU that appears twice has no link to itself.
    ///
    /// # Panics
    /// If one of them is not below `size`.
    pub fn select(&self, order: &[usize]) -> Self {
        Self(Square::from_pairs(order.len(), |a, b| self.links(order[a], order[b])))
    }

    /// Returns the counts, row by row.
    pub fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.0.rows()
    }

    /// Returns true if every pair is linked.
    pub fn complete(&self) -> bool {
        self.0.every_pair(|links| links > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus(bus: u8) -> PciAddress {
        PciAddress { domain: 0, bus, device: 0 }
    }

    fn to(gpu: u8) -> Remote {
        Remote::Gpu(bus(gpu))
    }

    fn observed(gpus: &[&[Remote]]) -> Vec<Vec<u32>> {
        let links = |(gpu, remotes): (usize, &&[Remote])| GpuLinks {
            bus: bus(gpu as u8),
            remotes: remotes.to_vec(),
        };
        let links: Vec<GpuLinks> = gpus.iter().enumerate().map(links).collect();
        NvlMesh::observed(&links).rows().map(<[u32]>::to_vec).collect()
    }

    #[test]
    fn direct_links_are_counted_per_pair() {
        let counts =
            observed(&[&[to(1), to(1), to(2)], &[to(0), to(0)], &[to(0), Remote::Unknown]]);
        assert_eq!(counts, [[0, 2, 1], [2, 0, 0], [1, 0, 0]]);
    }

    #[test]
    fn links_that_one_end_denies_and_links_to_itself_or_elsewhere_do_not_count() {
        assert_eq!(observed(&[&[to(1), to(1)], &[to(0)]]), [[0, 1], [1, 0]]);
        assert_eq!(observed(&[&[to(1)], &[]]), [[0, 0], [0, 0]]);
        assert_eq!(observed(&[&[to(0), to(9)], &[to(9)]]), [[0, 0], [0, 0]]);
    }

    #[test]
    fn the_gpu_with_fewer_links_to_switches_decides() {
        const S: Remote = Remote::Switch;
        let counts = observed(&[&[S; 18], &[S; 18], &[S; 17], &[Remote::Unknown; 18]]);
        assert_eq!(counts, [[0, 18, 17, 0], [18, 0, 17, 0], [17, 17, 0, 0], [0, 0, 0, 0]]);
    }

    #[test]
    fn a_selection_keeps_its_order() {
        let mesh = NvlMesh::new(&[vec![0, 1, 2], vec![1, 0, 3], vec![2, 3, 0]]).expect("symmetric");
        let selected = mesh.select(&[2, 0, 2]);
        assert_eq!(selected.rows().collect::<Vec<_>>(), [[0, 2, 0], [2, 0, 2], [0, 2, 0]]);
        assert!(mesh.complete() && !selected.complete());
        assert_eq!(mesh.select(&[]).size(), 0);
    }
}
