//! The hardware that selects a profile.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys;
use crate::topo::cost::LinkKind;
use crate::topo::{self, TopologySource};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// The device of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Host memory.
    Cpu,
    /// GPU memory.
    Cuda,
}

impl DeviceKind {
    /// Returns the device with this torch name.
    ///
    /// # Errors
    /// [`Value`](crate::error::ErrorKind::Value) for any other name.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            other => Err(Error::value(format!(
                "there is no cost model for devices of type {other:?}, but for cpu and cuda"
            ))),
        }
    }
}

/// Returns the model of this node's GPUs and how they access each other. The result is cached,
/// because every group that sets up its GPUs needs it and NVML is slow.
pub fn gpus() -> Option<&'static (String, LinkKind)> {
    static GPUS: OnceLock<(String, LinkKind)> = OnceLock::new();
    if let Some(known) = GPUS.get() {
        return Some(known);
    }
    let detected =
        topo::detect().ok().filter(|detected| detected.source == TopologySource::Nvml)?;
    let link = if Config::get().p2p { LinkKind::between(&detected)? } else { LinkKind::HostMemory };
    let found = (detected.gpus.first()?.name.clone(), link);
    Some(GPUS.get_or_init(|| found))
}

/// The hardware of a measurement. Times do not apply to other hardware.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Device: CPU or GPU.
    pub device: DeviceKind,
    /// Model of the processor or GPU.
    pub name: String,
    /// Number of cores that a process may use; 0 for GPUs.
    pub cores: usize,
    /// Kind of link between the ranks.
    pub link: String,
    /// Number of the job's ranks on this node: on CPU they share cores and memory, whichever group
    /// they are in.
    pub ranks: usize,
}

impl Hardware {
    /// Returns the hardware of this node for a job of `ranks` ranks; `None` if its model is
    /// unknown.
    pub fn here(device: DeviceKind, ranks: usize) -> Option<Self> {
        match device {
            DeviceKind::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                Some(Self {
                    device,
                    name: sys::node_id::cpu().into(),
                    cores,
                    link: LinkKind::SharedMemory.to_string(),
                    ranks,
                })
            }
            DeviceKind::Cuda => {
                let (name, link) = gpus()?;
                Some(Self { device, name: name.clone(), cores: 0, link: link.to_string(), ranks })
            }
        }
    }

    /// Returns the name of its profile file: `cpu-amd-epyc-4-cores-4-ranks.json`.
    pub fn file_name(&self) -> String {
        let words = match self.device {
            DeviceKind::Cpu => {
                format!("cpu {} {} cores {} ranks", self.name, self.cores, self.ranks)
            }
            DeviceKind::Cuda => format!("cuda {} {} {} ranks", self.name, self.link, self.ranks),
        };
        let plain: String = words
            .to_lowercase()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { ' ' })
            .collect();
        plain.split_whitespace().collect::<Vec<_>>().join("-") + ".json"
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.device {
            DeviceKind::Cpu => write!(
                f,
                "{} ranks on {} cores of {}, {}",
                self.ranks, self.cores, self.name, self.link
            ),
            DeviceKind::Cuda => write!(f, "{} ranks on {}, {}", self.ranks, self.name, self.link),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_plain() {
        let cpu = Hardware {
            device: DeviceKind::Cpu,
            name: "Intel(R) Xeon(R) @ 2.1GHz".into(),
            cores: 4,
            link: "shared memory".into(),
            ranks: 2,
        };
        assert_eq!(cpu.file_name(), "cpu-intel-r-xeon-r-2-1ghz-4-cores-2-ranks.json");
        let cuda = Hardware {
            device: DeviceKind::Cuda,
            name: "NVIDIA H200".into(),
            cores: 0,
            link: "NVLink 4.0 x 18".into(),
            ranks: 8,
        };
        assert_eq!(cuda.file_name(), "cuda-nvidia-h200-nvlink-4-0-x-18-8-ranks.json");
    }

    #[test]
    fn this_host_has_a_cpu() {
        let here = Hardware::here(DeviceKind::Cpu, 4).expect("a model");
        assert!(here.cores > 0 && !here.name.is_empty() && here.ranks == 4, "{here}");
        assert_eq!(
            DeviceKind::named("xpu").expect_err("none").message,
            "there is no cost model for devices of type \"xpu\", but for cpu and cuda"
        );
    }
}
