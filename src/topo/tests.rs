//! Tests of `detect` with given readings and files, without a call to NVML.

use super::mesh::{GpuLinks, Remote};
use super::*;
use crate::error::ErrorKind;

fn gpu(name: &str, bus: u8) -> Gpu {
    let path = Some(format!("/sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:00.0"));
    let bus = PciAddress { domain: 0, bus, device: 0 };
    Gpu {
        uuid: Uuid::new(name),
        bus,
        name: "NVIDIA X".into(),
        numa: Some(0),
        path,
        nvlink: None,
        mig: Mig::Off,
    }
}

/// Three GPUs on switches, the third with MIG.
fn readings() -> Readings {
    let mut gpus = vec![gpu("GPU-a", 1), gpu("GPU-b", 2), gpu("GPU-c", 3)];
    gpus[2].mig = Mig::On(vec![Uuid::new("MIG-x"), Uuid::new("MIG-y")]);
    let remotes = |gpu: &Gpu| if gpu.mig == Mig::Off { vec![Remote::Switch; 18] } else { vec![] };
    let links = gpus.iter().map(|gpu| GpuLinks { bus: gpu.bus, remotes: remotes(gpu) }).collect();
    Readings { gpus, links, peers: Square::from_pairs(3, |_, b| b != 2) }
}

fn select(detected: &Topology, uuids: &[&str]) -> Result<Topology> {
    detected.select(&uuids.iter().map(|uuid| Uuid::new(uuid)).collect::<Vec<_>>())
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, text).expect("it can be written");
    file
}

fn injected(text: &str, readings: std::result::Result<&Readings, &str>) -> Result<Topology> {
    let file = file(text);
    assemble(Some(file.path().to_str().expect("UTF-8")), readings)
}

const THREE: &str = r#"{"gpus": 3, "links": [[0, 1, 2], [1, 0, 3], [2, 3, 0]], "p2p": true}"#;

#[test]
fn this_node_is_detected_without_failing() {
    let detected = detect().expect("with or without NVML");
    if let TopologySource::Absent(reason) = &detected.source {
        assert!(reason.starts_with("NVML "), "{reason}");
        assert_eq!(
            (detected.gpus.len(), detected.mesh.size(), &detected.topology),
            (0, 0, &MeshShape::Unknown)
        );
        let error = connectivity_of(&["GPU-a".into()]).expect_err("nothing is known");
        assert_eq!(error.kind, ErrorKind::Config);
        assert!(error.message.starts_with("how GPU a is connected is not known: NVML "), "{error}");
    }
    assert_eq!(connectivity_of(&[]).map(|mesh| mesh.size()), Ok(0));
}

#[test]
fn a_selection_has_the_order_asked_for_and_a_structure_of_its_own() {
    let detected = assemble(None, Ok(&readings())).expect("readings");
    assert_eq!(
        (&detected.source, &detected.topology),
        (&TopologySource::Nvml, &MeshShape::Unknown)
    );
    let two = select(&detected, &["B", "GPU-a"]).expect("both are there");
    assert_eq!(two.topology, MeshShape::FullyConnected);
    assert_eq!(two.gpus.iter().map(|gpu| gpu.bus.bus).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(two.mesh.links(0, 1), 18);
}

#[test]
fn instances_of_one_gpu_are_unlinked() {
    let detected = assemble(None, Ok(&readings())).expect("readings");
    let instances = select(&detected, &["MIG-x", "MIG-y", "GPU-a"]).expect("all are there");
    assert_eq!(instances.topology, MeshShape::Unknown);
    assert!(instances.peers.every_pair(|granted| !granted));
}

#[test]
fn an_unknown_gpu_is_named() {
    let message =
        |detected: &Topology| select(detected, &["GPU-z"]).expect_err("it is not there").message;
    let detected = assemble(None, Ok(&readings())).expect("readings");
    assert_eq!(message(&detected), "GPU z is not among the 3 that NVML shows to this process");
    let detected = assemble(None, Err("no library")).expect("no NVML is no error");
    assert_eq!(message(&detected), "how GPU z is connected is not known: no library");
    let message = message(&injected(THREE, Ok(&readings())).expect("a right file"));
    assert!(
        message.starts_with("GPU z is not among the first 3 of this node, which /"),
        "{message}"
    );
}

#[test]
fn a_file_replaces_the_links_of_the_gpus_that_are_there() {
    let detected = injected(THREE, Ok(&readings())).expect("a right file");
    assert_eq!(detected.topology, MeshShape::FullyConnected);
    assert_eq!(select(&detected, &["c", "a"]).expect("both are there").mesh.links(0, 1), 2);
}

#[test]
fn a_file_may_describe_gpus_that_are_not_there() {
    let mut one = readings();
    one.gpus.truncate(1);
    for (readings, first) in [(Err("no library"), "injected-0"), (Ok(&one), "a")] {
        let detected = injected(THREE, readings).expect("a right file");
        let two = select(&detected, &[first, "injected-2"]).expect("both are there");
        assert_eq!(two.mesh.links(0, 1), 2);
    }
}

#[test]
fn a_faulty_file_is_an_error_even_with_nvml() {
    let error = injected(r#"{"gpus": 2}"#, Ok(&readings())).expect_err("no links");
    error.assert_says(ErrorKind::Config, &["missing field `links`"]);
}

#[test]
fn the_report_shows_every_pair() {
    let text = report::render(&assemble(None, Ok(&readings())).expect("readings"));
    let expected = "\
3 GPUs, unknown (NVML)

      GPU0  GPU1  GPU2  PCI           NUMA  NVLink  name
GPU0  X     NV18  NODE  0000:01:00.0  0     -       NVIDIA X
GPU1  NV18  X     NODE  0000:02:00.0  0     -       NVIDIA X
GPU2  NODE  NODE  X     0000:03:00.0  0     -       NVIDIA X (MIG, 2 instances)

no peer access: 0-2 1-2

NV# = so many NVLinks
X = the GPU itself
PIX = at most one PCIe switch
PXB = several PCIe switches, no host bridge
PHB = a PCIe host bridge
NODE = host bridges of one NUMA node
SYS = the interconnect between NUMA nodes
";
    assert_eq!(text, expected);
    assert_eq!(
        report::render(&assemble(None, Err("no library")).expect("no NVML is no error")),
        "0 GPUs, unknown (no library)\n"
    );
}
