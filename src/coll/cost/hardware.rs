//! The hardware that selects a profile.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys;
use crate::topo::cost::Way;
use crate::topo::{self, Source};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// The device of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// Host memory.
    Cpu,
    /// GPU memory.
    Cuda,
}

impl Device {
    /// Returns the device with this torch name.
    ///
    /// # Errors
    /// [`Value`](crate::error::Kind::Value) for any other name.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            other => Err(Error::value(format!("there is no cost model for devices of type {other:?}, but for cpu and cuda"))),
        }
    }
}

/// Returns the model of this node's GPUs and how they access each other. The result is cached, because every group that
/// sets up its GPUs needs it and NVML is slow.
pub fn gpus() -> Option<&'static (String, Way)> {
    static GPUS: OnceLock<(String, Way)> = OnceLock::new();
    if let Some(known) = GPUS.get() {
        return Some(known);
    }
    let detected = topo::detect().ok().filter(|detected| detected.source == Source::Nvml)?;
    let link = if Config::get().p2p { Way::between(&detected)? } else { Way::HostMemory };
    let found = (detected.gpus.first()?.name.clone(), link);
    Some(GPUS.get_or_init(|| found))
}

/// The hardware of a measurement. Times do not apply to other hardware.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Device: CPU or GPU.
    pub device: Device,
    /// Model of the processor or GPU.
    pub name: String,
    /// Number of cores that a process may use; 0 for GPUs.
    pub cores: usize,
    /// Kind of link between the ranks.
    pub link: String,
    /// Number of the job's ranks on this node: on CPU they share cores and memory, whichever group they are in.
    pub ranks: usize,
}

impl Hardware {
    /// Returns the hardware of this node for a job of `ranks` ranks; `None` if its model is unknown.
    pub fn here(device: Device, ranks: usize) -> Option<Self> {
        match device {
            Device::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                Some(Self { device, name: sys::host::cpu().into(), cores, link: Way::SharedMemory.to_string(), ranks })
            }
            Device::Cuda => {
                let (name, link) = gpus()?;
                Some(Self { device, name: name.clone(), cores: 0, link: link.to_string(), ranks })
            }
        }
    }

    /// Returns the name of its profile file: `cpu-amd-epyc-4-cores-4-ranks.json`.
    pub fn file_name(&self) -> String {
        let words = match self.device {
            Device::Cpu => format!("cpu {} {} cores {} ranks", self.name, self.cores, self.ranks),
            Device::Cuda => format!("cuda {} {} {} ranks", self.name, self.link, self.ranks),
        };
        let plain: String = words.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { ' ' }).collect();
        plain.split_whitespace().collect::<Vec<_>>().join("-") + ".json"
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.device {
            Device::Cpu => write!(f, "{} ranks on {} cores of {}, {}", self.ranks, self.cores, self.name, self.link),
            Device::Cuda => write!(f, "{} ranks on {}, {}", self.ranks, self.name, self.link),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_plain() {
        let cpu =
            Hardware { device: Device::Cpu, name: "Intel(R) Xeon(R) @ 2.1GHz".into(), cores: 4, link: "shared memory".into(), ranks: 2 };
        assert_eq!(cpu.file_name(), "cpu-intel-r-xeon-r-2-1ghz-4-cores-2-ranks.json");
        let cuda = Hardware { device: Device::Cuda, name: "NVIDIA H200".into(), cores: 0, link: "NVLink 4.0 x 18".into(), ranks: 8 };
        assert_eq!(cuda.file_name(), "cuda-nvidia-h200-nvlink-4-0-x-18-8-ranks.json");
    }

    #[test]
    fn this_host_has_a_cpu() {
        let here = Hardware::here(Device::Cpu, 4).expect("a model");
        assert!(here.cores > 0 && !here.name.is_empty() && here.ranks == 4, "{here}");
        assert_eq!(
            Device::named("xpu").expect_err("none").message,
            "there is no cost model for devices of type \"xpu\", but for cpu and cuda"
        );
    }
}
