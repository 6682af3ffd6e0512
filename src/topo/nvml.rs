//! Queries NVML about the GPUs of this node. The only user of `nvml_wrapper`.
#![allow(unsafe_code, reason = "functions of NVML, found at run time")]

use super::device::{Gpu, Mig, NvlinkVersion, PciAddress, Uuid};
use super::mesh::{GpuLinks, Remote};
use super::square::Square;
use super::sysfs;
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::OnceLock;

const LIBRARY: &str = "libnvidia-ml.so.1";
/// `NVML_NVLINK_MAX_LINKS` of NVML 13, the maximum number of links per GPU.
const MAX_LINKS: u32 = 18;

/// The GPUs of this node in the order of their PCI addresses, and what each one reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Readings {
    pub(super) gpus: Vec<Gpu>,
    pub(super) links: Vec<GpuLinks>,
    /// True for a pair if, according to NVML, each of the two GPUs may access the other's memory.
    pub(super) peers: Square<bool>,
}

/// Returns the readings, or why NVML is not available. A process queries NVML once.
///
/// NVML is closed again, because forked ranks would inherit its open device files.
pub(super) fn readings() -> Result<&'static Readings, &'static str> {
    static FACTS: OnceLock<Result<Readings, String>> = OnceLock::new();
    let readings = FACTS.get_or_init(|| {
        let readings = read(OsStr::new(LIBRARY), Path::new("/sys"));
        match &readings {
            Ok(readings) => log::debug!("NVML: {readings:?}"),
            Err(reason) => log::debug!("no NVML: {reason}"),
        }
        readings
    });
    readings.as_ref().map_err(String::as_str)
}

/// Queries the NVML library at `library`. GPUs that it cannot identify are skipped with a warning.
fn read(library: &OsStr, sys: &Path) -> Result<Readings, String> {
    let nvml = Nvml::builder()
        .lib_path(library)
        .init()
        .map_err(|error| format!("NVML does not start: {error}"))?;
    let count = nvml.device_count().map_err(|error| format!("NVML counts no GPUs: {error}"))?;
    let named = (0..count).filter_map(|index| {
        let found =
            nvml.device_by_index(index).map_err(|error| error.to_string()).and_then(|device| {
                let gpu = describe(&device, sys)?;
                Ok((gpu, device))
            });
        found.inspect_err(|error| log::warn!("NVML's GPU {index} is left out: {error}")).ok()
    });
    let mut devices: Vec<(Gpu, Device<'_>)> = named.collect();
    devices.sort_by_key(|(gpu, _)| gpu.bus);
    let links = devices
        .iter()
        .map(|(gpu, device)| GpuLinks { bus: gpu.bus, remotes: remotes(device, gpu) })
        .collect();
    let peers = Square::from_pairs(devices.len(), |a, b| {
        let ((one, one_device), (other, other_device)) = (&devices[a], &devices[b]);
        one.mig == Mig::Off && other.mig == Mig::Off && (a == b || reach(one_device, other_device))
    });
    Ok(Readings { gpus: devices.into_iter().map(|(gpu, _)| gpu).collect(), links, peers })
}

fn describe(device: &Device<'_>, sys: &Path) -> Result<Gpu, String> {
    let sentence = |error: NvmlError| error.to_string();
    let uuid = Uuid::new(&device.uuid().map_err(sentence)?);
    let bus = device.pci_info().map_err(sentence)?.bus_id;
    let bus = PciAddress::parse(&bus).ok_or_else(|| format!("{bus:?} is no PCI address"))?;
    let place = sysfs::path_of(sys, bus);
    let up = (0..MAX_LINKS)
        .map(|link| device.link_wrapper_for(link))
        .find(|link| link.is_active().unwrap_or(false));
    Ok(Gpu {
        uuid,
        bus,
        name: device.name().unwrap_or_else(|_| "GPU".into()),
        // Not nvmlDeviceGetNumaNodeId, which returns the node that the GPU's own memory forms on
        // some machines.
        numa: place.numa,
        path: place.path,
        nvlink: up.and_then(|link| NvlinkVersion::from_nvml(link.version().ok()?)),
        mig: mig(device),
    })
}

/// Returns whether MIG is on. NVML returns an error for a GPU that does not support MIG.
fn mig(device: &Device<'_>) -> Mig {
    match device.mig_mode() {
        Ok(mode) if mode.current != 0 => {
            let most = device.mig_device_count().unwrap_or(0);
            // Instance numbers have gaps.
            Mig::On(
                (0..most)
                    .filter_map(|index| {
                        Some(Uuid::new(&device.mig_device_by_index(index).ok()?.uuid().ok()?))
                    })
                    .collect(),
            )
        }
        Ok(_) | Err(_) => Mig::Off,
    }
}

/// Returns the far ends of the active links. Empty with MIG, because instances cannot use links.
fn remotes(device: &Device<'_>, gpu: &Gpu) -> Vec<Remote> {
    let up = |link: &u32| device.link_wrapper_for(*link).is_active().unwrap_or(false);
    match gpu.mig {
        Mig::Off => (0..MAX_LINKS).filter(up).map(|link| remote(device, link)).collect(),
        Mig::On(_) => Vec::new(),
    }
}

fn remote(device: &Device<'_>, link: u32) -> Remote {
    let gpu = || {
        let info = device.link_wrapper_for(link).remote_pci_info().ok()?;
        PciAddress::parse(&info.bus_id).map(Remote::Gpu)
    };
    match remote_type(device, link) {
        Some(RemoteType::Switch) => Remote::Switch,
        Some(RemoteType::Other) => Remote::Unknown,
        // Old drivers do not report a type; then the address counts if a GPU has it.
        Some(RemoteType::Gpu) | None => gpu().unwrap_or(Remote::Unknown),
    }
}

/// The values of `nvmlIntNvLinkDeviceType_t` that matter here.
enum RemoteType {
    Gpu,
    Switch,
    Other,
}

/// Returns the kind of the device at the far end; `None` if the driver does not report it.
///
/// nvml-wrapper 0.13 has `NvLink::remote_device_type`, but it lets NVML write to a temporary and
/// always returns `Unknown`.
fn remote_type(device: &Device<'_>, link: u32) -> Option<RemoteType> {
    let ask = device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().ok()?;
    let mut kind = 255;
    // SAFETY: the handle belongs to `device`, whose borrow of its `Nvml` keeps the library open and
    // initialised. NVML checks `link` and writes only to `kind`, an unsigned int like its C
    // enumeration.
    let status = unsafe { ask(device.handle(), link, &mut kind) };
    (status == 0).then_some(match kind {
        0 => RemoteType::Gpu,
        2 => RemoteType::Switch,
        // 1: a POWER processor; 255: unknown.
        _ => RemoteType::Other,
    })
}

/// Returns true if each of two GPUs may read and write the other's memory.
fn reach(one: &Device<'_>, other: &Device<'_>) -> bool {
    let ways = [(one, other), (other, one)];
    let granted = |index: fn() -> P2pCapabilitiesIndex| {
        ways.iter().all(|(a, b)| matches!(a.p2p_status(b, index()), Ok(P2pStatus::Ok)))
    };
    granted(|| P2pCapabilitiesIndex::Read) && granted(|| P2pCapabilitiesIndex::Write)
}

#[cfg(test)]
mod tests;
