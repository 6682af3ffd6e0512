//! Topology: how the GPUs of this node are connected.
//!
//! [`nvml`] queries the driver, or [`topology_file`] reads a file instead; the rest is pure:
//! [`mesh`] counts links, [`graph`] classifies the structure, [`ancestry`] finds the common
//! ancestor of two devices on the PCI bus, [`report`] prints all of it. See
//! `docs/design/topology.md`.

pub mod ancestry;
pub mod cost;
pub mod device;
pub mod graph;
pub mod mesh;
mod nvml;
pub mod report;
pub mod square;
mod sysfs;
pub mod topology_file;

use crate::config::Config;
use crate::error::{Error, Result};
use device::{Gpu, Mig, PciAddress, Uuid};
use graph::{MeshShape, classify};
use mesh::NvlMesh;
use nvml::Readings;
use square::Square;
use std::path::Path;
use topology_file::TopologyFile;

/// The source of a topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopologySource {
    /// NVML reported it.
    Nvml,
    /// The file of this name (`SYMM_TOPOLOGY_FILE`).
    Injected(String),
    /// NVML is not available, for this reason, so no GPU is known.
    Absent(String),
}

/// GPUs and their connections. Everything is in the order of `gpus`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The source of the other fields.
    pub source: TopologySource,
    /// The GPUs; [`detect`] returns those of the node by PCI address.
    pub gpus: Vec<Gpu>,
    /// NVLinks between the GPUs.
    pub mesh: NvlMesh,
    /// Pairs that can access each other's memory.
    pub peers: Square<bool>,
    /// The structure that results from the links and pairs.
    pub topology: MeshShape,
}

impl Topology {
    fn new(source: TopologySource, gpus: Vec<Gpu>, mesh: NvlMesh, peers: Square<bool>) -> Self {
        let topology = classify(&mesh, &peers);
        Self { source, gpus, mesh, peers, topology }
    }

    /// Returns the topology of only the GPUs with these UUIDs, in this order; its structure may
    /// differ from the structure of all GPUs. The UUID of a MIG instance selects its GPU, which
    /// then has neither links nor peers.
    ///
    /// # Errors
    /// [`Config`](crate::error::ErrorKind::Config) names a UUID that is not among the GPUs.
    pub fn select(&self, uuids: &[Uuid]) -> Result<Self> {
        let order = uuids.iter().map(|uuid| self.place(uuid)).collect::<Result<Vec<_>>>()?;
        let peers = Square::from_pairs(order.len(), |a, b| self.peers.at(order[a], order[b]));
        let gpus = order.iter().map(|&gpu| self.gpus[gpu].clone()).collect();
        Ok(Self::new(self.source.clone(), gpus, self.mesh.select(&order), peers))
    }

    fn place(&self, uuid: &Uuid) -> Result<usize> {
        self.gpus.iter().position(|gpu| gpu.answers_to(uuid)).ok_or_else(|| {
            let count = self.gpus.len();
            Error::config(match &self.source {
                TopologySource::Nvml => {
                    format!("GPU {uuid} is not among the {count} that NVML shows to this process")
                }
                TopologySource::Injected(path) => format!(
                    "GPU {uuid} is not among the first {count} of this node, which {path} describes"
                ),
                TopologySource::Absent(reason) => {
                    format!("how GPU {uuid} is connected is not known: {reason}")
                }
            })
        })
    }
}

/// Returns the topology of this node's GPUs: from `SYMM_TOPOLOGY_FILE` if set, otherwise from NVML.
/// A node without NVML yields [`TopologySource::Absent`] and no error.
///
/// # Errors
/// [`Config`](crate::error::ErrorKind::Config) if the file is faulty.
pub fn detect() -> Result<Topology> {
    assemble(Config::get().topology_file.as_deref(), nvml::readings())
}

/// Returns the NVLink counts between the GPUs with these UUIDs, in this order, with or without the
/// prefix `GPU-`.
///
/// # Errors
/// The errors of [`detect`] and [`Topology::select`].
pub fn connectivity_of(uuids: &[String]) -> Result<NvlMesh> {
    let uuids: Vec<Uuid> = uuids.iter().map(|uuid| Uuid::new(uuid)).collect();
    Ok(detect()?.select(&uuids)?.mesh)
}

fn assemble(
    file: Option<&str>,
    readings: std::result::Result<&Readings, &str>,
) -> Result<Topology> {
    match (file, readings) {
        (Some(path), readings) => {
            let TopologyFile { mesh, peers } = TopologyFile::load(Path::new(path))?;
            let here = readings.map_or(&[][..], |readings| &readings.gpus);
            let gpus = (0..mesh.size())
                .map(|gpu| here.get(gpu).cloned().unwrap_or_else(|| stand_in(gpu)))
                .collect();
            Ok(Topology::new(TopologySource::Injected(path.into()), gpus, mesh, peers))
        }
        (None, Ok(readings)) => Ok(Topology::new(
            TopologySource::Nvml,
            readings.gpus.clone(),
            NvlMesh::observed(&readings.links),
            readings.peers.clone(),
        )),
        (None, Err(reason)) => {
            let nothing = NvlMesh::observed(&[]);
            Ok(Topology::new(
                TopologySource::Absent(reason.into()),
                vec![],
                nothing,
                Square::from_pairs(0, |_, _| false),
            ))
        }
    }
}

/// Makes a GPU that a file describes and the node does not have, with a UUID like `injected-3`.
fn stand_in(gpu: usize) -> Gpu {
    Gpu {
        uuid: Uuid::new(&format!("injected-{gpu}")),
        bus: PciAddress { domain: u32::MAX, bus: gpu as u8, device: 0 },
        name: "stand-in".into(),
        numa: None,
        path: None,
        nvlink: None,
        mig: Mig::Off,
    }
}

#[cfg(test)]
mod machines;
#[cfg(test)]
mod tests;
