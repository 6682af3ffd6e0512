//! Tests that the link matrices of known machines, and of meshes that no machine has, are
//! classified correctly.

use super::device::PciAddress;
use super::graph::{CubeMesh, MeshShape, classify};
use super::mesh::{GpuLinks, NvlMesh, Remote};
use super::square::Square;
use proptest::prelude::*;

type Rows = Vec<Vec<u32>>;

/// A DGX-1 with V100, as `nvidia-smi topo -m` shows it: six links per GPU, some of them in pairs.
const DGX_1V: [[u32; 8]; 8] = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
];

fn dgx_1v() -> Rows {
    DGX_1V.iter().map(|row| row.to_vec()).collect()
}

fn rows(size: usize, links: impl Fn(usize, usize) -> u32) -> Rows {
    (0..size).map(|a| (0..size).map(|b| if a == b { 0 } else { links(a, b) }).collect()).collect()
}

fn named(rows: &Rows, p2p: bool) -> MeshShape {
    let mesh = NvlMesh::new(rows).expect("symmetric");
    classify(&mesh, &Square::from_pairs(mesh.size(), |_, _| p2p))
}

fn cube(topology: MeshShape) -> CubeMesh {
    match topology {
        MeshShape::HybridCubeMesh(cube) => cube,
        other @ (MeshShape::FullyConnected | MeshShape::Pcie | MeshShape::Unknown) => {
            panic!("{other}")
        }
    }
}

#[test]
fn dgx_1v_is_a_hybrid_cube_mesh() {
    let cube = cube(named(&dgx_1v(), true));
    assert_eq!(cube.quad, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(cube.relay, [4, 5, 6, 7, 0, 1, 2, 3]);
    assert_eq!((cube.quad_of(2), cube.quad_of(7)), (cube.quad[0], cube.quad[1]));
}

#[test]
fn dgx_1v_out_of_what_its_gpus_report() {
    let bus = |gpu: usize| PciAddress { domain: 0, bus: gpu as u8 + 6, device: 0 };
    let to = |(other, links): (usize, &u32)| vec![Remote::Gpu(bus(other)); *links as usize];
    let links = |gpu: usize| GpuLinks {
        bus: bus(gpu),
        remotes: DGX_1V[gpu].iter().enumerate().flat_map(to).collect(),
    };
    let observed = NvlMesh::observed(&(0..8).map(links).collect::<Vec<_>>());
    assert_eq!(observed, NvlMesh::new(&dgx_1v()).expect("symmetric"));
}

/// (machine, GPUs, links of each GPU to switches)
const SWITCHED: [(&str, usize, usize); 6] = [
    ("DGX-2", 16, 6),
    ("DGX A100", 8, 12),
    ("HGX H100", 8, 18),
    ("HGX H200", 8, 18),
    ("half an HGX H200", 4, 18),
    ("one GPU", 1, 18),
];

#[test]
fn machines_with_switches_are_fully_connected() {
    for (machine, gpus, links) in SWITCHED {
        let bus = |gpu: usize| PciAddress { domain: 0, bus: gpu as u8, device: 0 };
        let observed: Vec<GpuLinks> = (0..gpus)
            .map(|gpu| GpuLinks { bus: bus(gpu), remotes: vec![Remote::Switch; links] })
            .collect();
        let mesh = NvlMesh::observed(&observed);
        let counts: Rows = mesh.rows().map(<[u32]>::to_vec).collect();
        assert_eq!(counts, rows(gpus, |_, _| links as u32), "{machine}");
        assert_eq!(named(&counts, true), MeshShape::FullyConnected, "{machine}");
    }
}

#[test]
fn bridged_pairs_are_not_fully_connected() {
    for gpus in [4, 8] {
        let pairs = rows(gpus, |a, b| if a / 2 == b / 2 { 4 } else { 0 });
        assert_eq!(named(&pairs, true), MeshShape::Pcie);
        assert_eq!(named(&pairs, false), MeshShape::Unknown);
    }
    assert_eq!(named(&rows(2, |_, _| 4), true), MeshShape::FullyConnected);
    assert_eq!(named(&rows(8, |_, _| 0), true), MeshShape::Pcie);
    assert_eq!(named(&vec![], true), MeshShape::Unknown);
}

#[test]
fn one_unlinked_gpu_spoils_pcie() {
    let mesh = NvlMesh::new(&rows(4, |_, _| 0)).expect("symmetric");
    assert_eq!(
        classify(&mesh, &Square::from_pairs(4, |a, b| (a, b) != (1, 3))),
        MeshShape::Unknown
    );
    // A device's access to itself does not matter.
    assert_eq!(classify(&mesh, &Square::from_pairs(4, |a, b| a != b)), MeshShape::Pcie);
}

#[test]
fn quads_of_a_cube_mesh_are_fully_connected() {
    let mesh = NvlMesh::new(&dgx_1v()).expect("symmetric");
    assert_eq!(
        named(&mesh.select(&[3, 1, 0, 2]).rows().map(<[u32]>::to_vec).collect(), true),
        MeshShape::FullyConnected
    );
    assert_eq!(
        named(&mesh.select(&[0, 1, 4, 5]).rows().map(<[u32]>::to_vec).collect(), true),
        MeshShape::Pcie
    );
}

#[test]
fn a_cube_mesh_without_one_link_is_none() {
    for a in 0..8 {
        for b in 0..a {
            let mut broken = dgx_1v();
            if broken[a][b] == 0 {
                continue;
            }
            (broken[a][b], broken[b][a]) = (0, 0);
            assert_eq!(named(&broken, true), MeshShape::Pcie, "without {a}-{b}");
            assert_eq!(named(&broken, false), MeshShape::Unknown, "without {a}-{b}");
        }
    }
}

#[test]
fn an_asymmetric_mesh_is_refused() {
    let mut broken = dgx_1v();
    broken[5][1] = 1;
    assert_eq!(
        NvlMesh::new(&broken).expect_err("asymmetric").message,
        "[1][5] is 2, but [5][1] is 1"
    );
}

#[test]
fn four_neighbours_alone_make_no_cube_mesh() {
    let near = |distances: [usize; 2]| {
        move |a: usize, b: usize| {
            u32::from(distances.contains(&a.abs_diff(b).min(8 - a.abs_diff(b))))
        }
    };
    let antiprism = |a: usize, b: usize| {
        let apart = a.abs_diff(b);
        u32::from(if a / 4 == b / 4 { apart % 2 == 1 } else { apart % 4 < 2 })
    };
    let graphs = [
        ("rings of distance 1 and 2", rows(8, near([1, 2]))),
        ("rings of distance 2 and 3", rows(8, near([2, 3]))),
        ("every even with every odd", rows(8, near([1, 3]))),
        ("two rings, each GPU joined to two of the other", rows(8, antiprism)),
    ];
    for (graph, rows) in graphs {
        for row in &rows {
            assert_eq!(row.iter().sum::<u32>(), 4, "{graph}: {row:?}");
        }
        assert_eq!(named(&rows, true), MeshShape::Pcie, "{graph}");
    }
}

/// Checks the definition of a cube mesh: fully linked quads, linked relays, and no other link.
fn spans(cube: &CubeMesh, mesh: &NvlMesh) -> bool {
    (0..8_u32).all(|a| {
        (0..8_u32).filter(|&b| b != a).all(|b| {
            let expected = cube.quad_of(a).contains(&b) || cube.relay[a as usize] == b;
            mesh.linked(a as usize, b as usize) == expected
        })
    })
}

/// Returns true if the eight GPUs are two fully linked quads, with exactly one link from each GPU
/// to the other quad. Tries every four GPUs that include GPU 0.
fn is_cube_mesh(mesh: &NvlMesh) -> bool {
    (0..=u8::MAX).filter(|quad| quad.count_ones() == 4 && quad & 1 == 1).any(|quad| {
        let together = |a: usize, b: usize| (quad >> a) & 1 == (quad >> b) & 1;
        (0..8).all(|a| {
            let mates = (0..8).filter(|&b| b != a && together(a, b)).all(|b| mesh.linked(a, b));
            mates && (0..8).filter(|&b| !together(a, b) && mesh.linked(a, b)).count() == 1
        })
    })
}

proptest! {
    #[test]
    fn labels_do_not_matter(order in Just((0_usize..8).collect::<Vec<_>>()).prop_shuffle()) {
        let mesh = NvlMesh::new(&dgx_1v()).expect("symmetric").select(&order);
        let cube = cube(classify(&mesh, &Square::from_pairs(8, |_, _| true)));
        prop_assert!(spans(&cube, &mesh));
        prop_assert!(cube.quad.iter().all(|quad| quad.is_sorted()) && cube.quad[0][0] == 0);
        // The same GPUs as without shuffling are relays of each other and share a quad.
        for (gpu, &relay) in cube.relay.iter().enumerate() {
            prop_assert_eq!(order[relay as usize] % 4, order[gpu] % 4);
            let quad = cube.quad_of(gpu as u32);
            prop_assert!(quad.iter().all(|&mate| order[mate as usize] / 4 == order[gpu] / 4));
        }
    }

    #[test]
    fn whatever_is_called_a_cube_mesh_is_one(
        swaps in prop::collection::vec(prop::array::uniform4(0_usize..8), 0..40)
    ) {
        let mut links = dgx_1v();
        // a-b and c-d become a-c and b-d, so every GPU keeps four neighbours.
        for [a, b, c, d] in swaps {
            let linked = links[a][b] > 0 && links[c][d] > 0;
            if linked && a != c && b != d && links[a][c] == 0 && links[b][d] == 0 {
                for (from, to, count) in [(a, b, 0), (c, d, 0), (a, c, 1), (b, d, 1)] {
                    (links[from][to], links[to][from]) = (count, count);
                }
            }
        }
        prop_assert!(links.iter().all(|row| row.iter().filter(|&&count| count > 0).count() == 4));
        let mesh = NvlMesh::new(&links).expect("symmetric");
        let found = CubeMesh::of(&mesh);
        prop_assert_eq!(found.is_some(), is_cube_mesh(&mesh));
        prop_assert!(found.is_none_or(|cube| spans(&cube, &mesh)));
    }
}
