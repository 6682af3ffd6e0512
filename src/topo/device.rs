//! The identifiers of a GPU, and its address on the PCI bus.

/// An address on the PCI bus, without the function, because a GPU is always function 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI segment; 32 bits, because hypervisors give virtual segments high numbers.
    pub domain: u32,
    /// Bus within the domain.
    pub bus: u8,
    /// Slot on the bus, 0 to 31.
    pub device: u8,
}

impl PciAddress {
    /// Parses `00000000:3B:00.0` (NVML), `0000:3b:00.0` (CUDA, sysfs), and both without the
    /// function. `None` for all other text, including `FFFFFFFF:FF:FF.0`, which NVML reports for
    /// the far end of a link that the machine hides.
    pub fn parse(text: &str) -> Option<Self> {
        let place = match text.split_once('.') {
            Some((place, function)) => {
                matches!(function.as_bytes(), [b'0'..=b'7']).then_some(place)?
            }
            None => text,
        };
        let mut parts = place.split(':');
        let mut part = || {
            parts.next().filter(|part| {
                !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit())
            })
        };
        let (domain, bus, device) = (part()?, part()?, part()?);
        let address = Self {
            domain: u32::from_str_radix(domain, 16).ok()?,
            bus: u8::from_str_radix(bus, 16).ok()?,
            device: u8::from_str_radix(device, 16).ok()?,
        };
        (parts.next().is_none() && address.device < 32).then_some(address)
    }
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

/// The UUID of a GPU or of a MIG instance, normalized: NVML adds the prefix `GPU-` or `MIG-`, torch
/// does not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(String);

impl Uuid {
    /// Parses the UUID in `text`, ignoring the prefix and case.
    pub fn new(text: &str) -> Self {
        let text = text.trim().to_ascii_lowercase();
        let bare =
            ["gpu-", "mig-"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(&text);
        Self(bare.to_owned())
    }
}

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Version of the NVLink protocol, as (major, minor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NvlinkVersion(pub u8, pub u8);

impl NvlinkVersion {
    /// Returns the version with NVML's number `code` (`NVML_NVLINK_VERSION_*`), if this crate knows
    /// it.
    pub fn from_nvml(code: u32) -> Option<Self> {
        const VERSIONS: [NvlinkVersion; 8] = [
            NvlinkVersion(1, 0),
            NvlinkVersion(2, 0),
            NvlinkVersion(2, 2),
            NvlinkVersion(3, 0),
            NvlinkVersion(3, 1),
            NvlinkVersion(4, 0),
            NvlinkVersion(5, 0),
            NvlinkVersion(6, 0),
        ];
        VERSIONS.get(usize::try_from(code).ok()?.checked_sub(1)?).copied()
    }
}

impl std::fmt::Display for NvlinkVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Whether a GPU is one device or is partitioned into MIG instances, which cannot reach other
/// devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mig {
    /// MIG is off: the GPU is one device.
    Off,
    /// MIG is on: the GPU is partitioned into these instances.
    On(Vec<Uuid>),
}

/// A GPU of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The UUID of the GPU itself; its MIG instances have their own.
    pub uuid: Uuid,
    /// Address on the PCI bus.
    pub bus: PciAddress,
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// The nearest NUMA node, if the system names one.
    pub numa: Option<u32>,
    /// The sysfs directory, whose path lists the bridges between the host and the device; `None` if
    /// sysfs does not show the device.
    pub path: Option<String>,
    /// The version of the GPU's links, if any link is up.
    pub nvlink: Option<NvlinkVersion>,
    /// True if the GPU is partitioned into instances.
    pub mig: Mig,
}

impl Gpu {
    /// Returns true if `uuid` names this GPU or an instance of it.
    pub fn answers_to(&self, uuid: &Uuid) -> bool {
        match &self.mig {
            Mig::Off => self.uuid == *uuid,
            Mig::On(instances) => self.uuid == *uuid || instances.contains(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_one_in_every_spelling() {
        let expected = Some(PciAddress { domain: 0, bus: 0x3b, device: 0 });
        for text in
            ["00000000:3B:00.0", "0000:3b:00.0", "0000:3B:00", "0:3b:0.0", "00000000:3b:00.7"]
        {
            assert_eq!(PciAddress::parse(text), expected, "{text}");
        }
        assert_eq!(
            PciAddress::parse("10000:01:1f.0"),
            Some(PciAddress { domain: 0x10000, bus: 1, device: 31 })
        );
        for text in [
            "",
            "3b:00.0",
            "FFFFFFFF:FF:FF.0",
            "0000:3b:20.0",
            "0000:3b:00.8",
            "0000:3b:00.",
            "0000:3b:00.00",
            "0:1:2:3",
            "+000:3b:00.0",
            "0000:100:00.0",
            "100000000:3b:00.0",
            "0000::00.0",
            "0000:3b:00.0\n",
            "zz:3b:00",
        ] {
            assert_eq!(PciAddress::parse(text), None, "{text}");
        }
        assert_eq!(expected.map(|address| address.to_string()), Some("0000:3b:00".into()));
    }

    #[test]
    fn uuids_are_one_in_every_spelling() {
        let expected = Uuid::new("1b3c5d7e-0000-1111-2222-333344445555");
        for text in
            ["GPU-1b3c5d7e-0000-1111-2222-333344445555", " 1B3C5D7E-0000-1111-2222-333344445555\n"]
        {
            assert_eq!(Uuid::new(text), expected);
        }
        assert_eq!(Uuid::new("MIG-1b3c5d7e-0000-1111-2222-333344445555"), expected);
        assert_ne!(Uuid::new("1b3c5d7e"), expected);
    }

    #[test]
    fn versions_are_those_of_nvml() {
        let cases = [
            (0, None),
            (1, Some(NvlinkVersion(1, 0))),
            (2, Some(NvlinkVersion(2, 0))),
            (6, Some(NvlinkVersion(4, 0))),
        ];
        for (code, version) in cases {
            assert_eq!(NvlinkVersion::from_nvml(code), version);
        }
        assert_eq!(NvlinkVersion::from_nvml(9), None);
        assert_eq!(NvlinkVersion::from_nvml(u32::MAX), None);
    }
}
