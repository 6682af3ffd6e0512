//! The structure of a mesh, on which algorithms can rely.

use super::mesh::NvlMesh;
use super::square::Square;

/// How a set of GPUs is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeshShape {
    /// Every pair has NVLinks, or there is only one GPU.
    FullyConnected,
    /// Two quads of linked GPUs, each GPU with one partner in the other quad.
    HybridCubeMesh(CubeMesh),
    /// PCIe: not every pair has NVLinks, but every pair has peer access.
    Pcie,
    /// No known structure: some pair can communicate only through host memory.
    Unknown,
}

impl std::fmt::Display for MeshShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::FullyConnected => "fully connected",
            Self::HybridCubeMesh(_) => "hybrid cube mesh",
            Self::Pcie => "PCIe",
            Self::Unknown => "unknown",
        })
    }
}

/// The hybrid cube mesh of a DGX-1: eight GPUs, two hops between any two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CubeMesh {
    /// Quads, each in ascending order; GPU 0 is in the first.
    pub quad: [[u32; 4]; 2],
    /// Each GPU's partner in the other quad; the relay of a GPU's relay is the GPU.
    pub relay: [u32; 8],
}

impl CubeMesh {
    /// Returns `mesh` as a cube mesh, if it is one.
    ///
    /// Each GPU has four neighbours. One of them, the relay, shares no neighbour with it; the other
    /// three and the GPU are its quad. The four GPUs of a quad agree on its members, and relays
    /// form pairs.
    pub fn of(mesh: &NvlMesh) -> Option<Self> {
        if mesh.size() != 8 {
            return None;
        }
        let neighbours: [Set; 8] =
            std::array::from_fn(|gpu| Set::of((0..8).filter(|&other| mesh.linked(gpu, other))));
        let mut relay = [0; 8];
        let mut quad = [Set(0); 8];
        for gpu in 0..8 {
            let mine = neighbours[gpu];
            let mut apart = mine.members().filter(|&other| mine.disjoint(neighbours[other]));
            let (Some(partner), None, 4) = (apart.next(), apart.next(), mine.members().count())
            else {
                return None;
            };
            relay[gpu] = partner as u32;
            quad[gpu] = Set::of(mine.members().filter(|&other| other != partner).chain([gpu]));
        }
        let agreed = (0..8).all(|gpu| quad[gpu].members().all(|other| quad[other] == quad[gpu]));
        let paired = (0..8).all(|gpu| relay[relay[gpu] as usize] as usize == gpu);
        let other = (0..8).find(|&gpu| quad[gpu] != quad[0])?;
        (agreed && paired).then(|| Self { quad: [quad[0].four(), quad[other].four()], relay })
    }

    /// Returns the members of `gpu`'s quad including itself, in ascending order.
    ///
    /// # Panics
    /// If `gpu` is not below 8.
    pub fn quad_of(&self, gpu: u32) -> [u32; 4] {
        assert!(gpu < 8, "GPU {gpu} of 8");
        if self.quad[0].contains(&gpu) { self.quad[0] } else { self.quad[1] }
    }
}

/// A subset of eight GPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Set(u8);

impl Set {
    fn of(gpus: impl Iterator<Item = usize>) -> Self {
        Self(gpus.fold(0, |set, gpu| set | 1 << gpu))
    }

    fn members(self) -> impl Iterator<Item = usize> {
        (0..8).filter(move |gpu| self.0 & (1 << gpu) != 0)
    }

    fn disjoint(self, other: Self) -> bool {
        self.0 & other.0 == 0
    }

    /// Returns the four members.
    fn four(self) -> [u32; 4] {
        let mut members = self.members();
        std::array::from_fn(|_| members.next().unwrap_or_default() as u32)
    }
}

/// Classifies `mesh`; `peers` is true for pairs that can access each other's memory. Links count as
/// usable here; whether the driver lets a process use them becomes known when memory is mapped.
///
/// # Panics
/// If `peers` and `mesh` have different sizes.
pub fn classify(mesh: &NvlMesh, peers: &Square<bool>) -> MeshShape {
    assert_eq!(mesh.size(), peers.size(), "links and peer access of different sets of GPUs");
    if mesh.size() == 0 {
        MeshShape::Unknown
    } else if mesh.complete() {
        MeshShape::FullyConnected
    } else if let Some(cube) = CubeMesh::of(mesh) {
        MeshShape::HybridCubeMesh(cube)
    } else if peers.every_pair(|granted| granted) {
        MeshShape::Pcie
    } else {
        MeshShape::Unknown
    }
}
