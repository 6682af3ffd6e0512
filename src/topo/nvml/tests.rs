//! Tests against a stand-in for NVML, compiled from `stub.c`.

use super::super::mesh::NvlMesh;
use super::*;

fn stub(flags: &[&str]) -> Readings {
    let folder = tempfile::tempdir().expect("a folder");
    let library = folder.path().join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/topo/nvml/stub.c");
    let mut compiler = std::process::Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .args(flags);
    assert!(compiler.status().expect("the linker that rustc uses").success());
    read(library.as_os_str(), folder.path()).expect("the stub is complete")
}

fn links(readings: &Readings) -> Vec<Vec<u32>> {
    NvlMesh::observed(&readings.links).rows().map(<[u32]>::to_vec).collect()
}

#[test]
fn gpus_come_by_address_with_their_links_and_peers_without_the_lost_one() {
    let readings = stub(&[]);
    let seen: Vec<String> =
        readings.gpus.iter().map(|gpu| format!("{} {} {}", gpu.uuid, gpu.bus, gpu.name)).collect();
    let expected = [
        "a 0000:3b:00 NVIDIA One",
        "b 0000:3c:00 NVIDIA One",
        "d 0000:5d:00 NVIDIA Alone",
        "c 0000:5e:00 NVIDIA Cut",
    ]
    .map(String::from);
    assert_eq!(seen, expected);
    let versions: Vec<_> = readings.gpus.iter().map(|gpu| gpu.nvlink).collect();
    let four = Some(NvlinkVersion(4, 0));
    assert_eq!(versions, [four, four, None, four]);
    // The type of the far end decides, not its address. GPUs a and b have two direct links and one
    // link through switches, to which a has one link and b has two. The switches of b hide their
    // address; the switch of a reports b's address. A link to a hidden GPU does not count.
    assert_eq!(links(&readings), [[0, 3, 0, 0], [3, 0, 0, 0], [0; 4], [0; 4]]);
    // A GPU in instances has neither links nor peers.
    assert_eq!(readings.gpus[3].mig, Mig::On(vec![Uuid::new("x"), Uuid::new("y")]));
    assert_eq!(readings.links[3].remotes, []);
    let expected = [
        [true, true, false, false],
        [true, true, true, false],
        [false, true, true, false],
        [false; 4],
    ];
    assert_eq!(readings.peers.rows().collect::<Vec<_>>(), expected);
}

#[test]
fn a_driver_that_tells_no_type_still_shows_direct_links() {
    assert_eq!(links(&stub(&["-DOLD_DRIVER"])), [[0, 2, 0, 0], [2, 0, 0, 0], [0; 4], [0; 4]]);
}

#[test]
fn a_missing_library_is_a_sentence() {
    let reason = read(OsStr::new("/nowhere/libnvidia-ml.so.1"), Path::new("/sys"))
        .expect_err("it is not there");
    assert!(
        reason.starts_with("NVML does not start: ")
            && reason.contains("/nowhere/libnvidia-ml.so.1"),
        "{reason}"
    );
}

#[test]
fn a_library_that_is_another_is_a_sentence() {
    let reason = read(OsStr::new("libc.so.6"), Path::new("/sys")).expect_err("it is no NVML");
    assert!(reason.starts_with("NVML does not start: "), "{reason}");
}
