//! A topology file: no text may make its reader panic, and an accepted topology is square,
//! symmetric and within the size limit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::topo::topology_file::TopologyFile;

fuzz_target!(|data: &[u8]| {
    if let Ok(TopologyFile { mesh, peers }) = TopologyFile::parse(data) {
        assert!((1..=64).contains(&mesh.size()) && peers.size() == mesh.size());
        for (a, b) in (0..mesh.size()).flat_map(|a| (0..mesh.size()).map(move |b| (a, b))) {
            assert_eq!((mesh.links(a, b), peers.at(a, b)), (mesh.links(b, a), peers.at(b, a)));
        }
    }
});
