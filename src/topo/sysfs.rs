//! The location of a PCI device in sysfs.

use super::device::PciAddress;
use std::path::Path;

/// The properties of a device in sysfs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PciPath {
    /// The directory of the device; its path lists the bridges between the host and the device.
    pub(super) path: Option<String>,
    /// The nearest NUMA node; `None` if the system writes -1.
    pub(super) numa: Option<u32>,
}

/// Reads the location of the device at `bus`; `root` is `/sys`. Unreadable files yield `None`.
pub(super) fn path_of(root: &Path, bus: PciAddress) -> PciPath {
    let link = root.join(format!("bus/pci/devices/{bus}.0"));
    PciPath {
        path: std::fs::canonicalize(&link)
            .ok()
            .and_then(|path| path.into_os_string().into_string().ok()),
        numa: std::fs::read_to_string(link.join("numa_node"))
            .ok()
            .and_then(|node| node.trim().parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_and_node_are_found() -> std::io::Result<()> {
        let root = tempfile::tempdir()?;
        let devices = root.path().join("bus/pci/devices");
        std::fs::create_dir_all(&devices)?;
        for (name, node) in [("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n")] {
            let folder = root.path().join("devices/pci0000:3a").join(name);
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join("numa_node"), node)?;
            std::os::unix::fs::symlink(&folder, devices.join(name))?;
        }
        let at = |bus| path_of(root.path(), PciAddress { domain: 0, bus, device: 0 });
        assert!(
            at(0x3b).path.is_some_and(|path| path.ends_with("/devices/pci0000:3a/0000:3b:00.0"))
        );
        assert_eq!((at(0x3b).numa, at(0x3c).numa), (Some(1), None));
        assert_eq!(at(0x3d), PciPath { path: None, numa: None });
        Ok(())
    }
}
