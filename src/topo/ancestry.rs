//! The nearest common ancestor of two devices on the PCI tree, in the terms of `nvidia-smi topo
//! -m`.

/// The nearest component through which two devices reach each other, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PciAncestor {
    /// Both are the same device.
    Same,
    /// At most one PCIe switch is between them.
    Pix,
    /// Several PCIe switches, but no host bridge.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// The interconnect between the host bridges of one NUMA node.
    Node,
    /// The interconnect between NUMA nodes.
    Sys,
}

impl PciAncestor {
    /// All ancestors, nearest first.
    pub const ALL: [Self; 6] = [Self::Same, Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Returns the abbreviation that nvidia-smi uses.
    pub fn label(self) -> &'static str {
        match self {
            Self::Same => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// Returns the meaning of the label.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Same => "the GPU itself",
            Self::Pix => "at most one PCIe switch",
            Self::Pxb => "several PCIe switches, no host bridge",
            Self::Phb => "a PCIe host bridge",
            Self::Node => "host bridges of one NUMA node",
            Self::Sys => "the interconnect between NUMA nodes",
        }
    }

    /// Returns the nearest common ancestor of two devices, given their sysfs directories, such as
    /// `/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0`, and their NUMA nodes. An unknown
    /// directory shares nothing. A machine that reports no NUMA nodes counts as one.
    pub fn common(one: (Option<&str>, Option<u32>), other: (Option<&str>, Option<u32>)) -> Self {
        if let (Some(one), Some(other)) = (one.0.and_then(below_host), other.0.and_then(below_host))
            && one.first() == other.first()
        {
            let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
            return match (shared, one.len() - shared, other.len() - shared) {
                (_, 0, 0) => Self::Same,
                (1, _, _) => Self::Phb,
                // Below the upstream port of a switch: at most a downstream port and the device
                // itself, for each of the two.
                (_, 0..=2, 0..=2) => Self::Pix,
                (_, _, _) => Self::Pxb,
            };
        }
        if one.1 == other.1 { Self::Node } else { Self::Sys }
    }
}

/// Returns the parts of a sysfs path from the host bridge (`pci0000:00`) to the device; `None` if
/// it contains no host bridge.
fn below_host(path: &str) -> Option<Vec<&str>> {
    let is_host = |part: &&str| part.strip_prefix("pci").is_some_and(|rest| rest.contains(':'));
    let parts: Vec<&str> =
        path.split('/').filter(|part| !part.is_empty()).skip_while(|part| !is_host(part)).collect();
    (!parts.is_empty()).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::PciAncestor::{self, Node, Phb, Pix, Pxb, Same, Sys};

    const SWITCH: &str = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";

    fn common(one: &str, other: &str) -> PciAncestor {
        PciAncestor::common((Some(one), Some(0)), (Some(other), Some(0)))
    }

    #[test]
    fn folders_give_the_nearest_ancestor() {
        let below = |rest: &str| format!("{SWITCH}/{rest}");
        let one = below("0000:3c:04.0/0000:3d:00.0");
        let cases = [
            (one.clone(), Same),
            (below("0000:3c:08.0/0000:3e:00.0"), Pix),
            // A second switch below the first.
            (below("0000:3c:08.0/0000:3e:00.0/0000:3f:04.0/0000:40:00.0"), Pxb),
            ("/sys/devices/pci0000:3a/0000:3a:02.0/0000:41:00.0".into(), Phb),
            ("/sys/devices/pci0000:5d/0000:5d:00.0/0000:5e:00.0".into(), Node),
        ];
        for (other, expected) in cases {
            assert_eq!(common(&one, &other), expected, "{other}");
            assert_eq!(common(&other, &one), expected, "{other}");
        }
    }

    #[test]
    fn two_chips_behind_one_root_port_share_a_switch() {
        assert_eq!(
            common(&format!("{SWITCH}/0000:3c:00.0"), &format!("{SWITCH}/0000:3c:01.0")),
            Pix
        );
    }

    #[test]
    fn a_virtual_machine_hangs_all_on_one_host_bridge() {
        assert_eq!(
            common("/sys/devices/pci0000:00/0000:00:05.0", "/sys/devices/pci0000:00/0000:00:06.0"),
            Phb
        );
        let azure = "/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/";
        let (one, other) = (
            format!("{azure}a/pci0001:00/0001:00:00.0"),
            format!("{azure}b/pci0002:00/0002:00:00.0"),
        );
        assert_eq!(common(&one, &other), Node);
    }

    #[test]
    fn without_folders_nodes_decide() {
        for (one, other, expected) in [
            (Some(0), Some(0), Node),
            (Some(0), Some(1), Sys),
            (None, None, Node),
            (None, Some(0), Sys),
        ] {
            assert_eq!(PciAncestor::common((None, one), (None, other)), expected);
            assert_eq!(
                PciAncestor::common(
                    (Some("/sys/devices/pci0000:00/0000:00:01.0"), one),
                    (None, other)
                ),
                expected
            );
            assert_eq!(
                PciAncestor::common((Some("no host bridge"), one), (Some("no host bridge"), other)),
                expected
            );
        }
        let (one, other) =
            ("/sys/devices/pci0000:00/0000:01:00.0", "/sys/devices/pci0000:80/0000:81:00.0");
        assert_eq!(PciAncestor::common((Some(one), Some(0)), (Some(other), Some(1))), Sys);
    }

    #[test]
    fn nearest_comes_first() {
        assert!(PciAncestor::ALL.is_sorted());
    }
}
