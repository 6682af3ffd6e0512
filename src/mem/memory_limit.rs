//! Determines how much more memory this process may use, given the machine's free memory and each
//! control group that limits the process.

use crate::sys::fork::PerProcess;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Upper bound on the memory that is still available. Memory that the kernel can drop or swap out
/// counts as free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Number of bytes that are still available.
    pub free: u64,
    /// The name of the machine or group that sets the limit.
    of: String,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} are free {}", self.free, self.of)
    }
}

/// Returns the tightest limit of this process; `None` if no limit is known.
pub fn tightest() -> Option<MemoryLimit> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let swap = field(&meminfo, "SwapFree:").unwrap_or(0) * 1024;
    let machine = field(&meminfo, "MemAvailable:")
        .map(|kib| MemoryLimit { free: kib * 1024 + swap, of: "on this machine".into() });
    // The groups are determined once, because a process is usually moved to its groups before it
    // starts.
    static GROUPS: PerProcess<OnceLock<Vec<(CgroupVersion, PathBuf)>>> =
        PerProcess::new(OnceLock::new);
    let groups = GROUPS.get().get_or_init(|| {
        let own = |name: &str| read(&Path::new("/proc/self").join(name)).unwrap_or_default();
        folders(&own("cgroup"), &own("mountinfo"))
    });
    let limited = groups.iter().flat_map(|(version, folder)| {
        let free = version.free(swap, |name| read(&folder.join(name)));
        free.map(|free| MemoryLimit {
            free,
            of: format!("in the memory cgroup {}", folder.display()),
        })
    });
    limited.chain(machine).min_by_key(|limit| limit.free)
}

/// Returns the number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '\t'])))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Version of the control groups; both may be mounted, and one of them controls the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

impl CgroupVersion {
    /// Returns how much memory one group still allows, if it sets a limit. `read` reads one of its
    /// files.
    fn free(self, swap: u64, read: impl Fn(&str) -> Option<String>) -> Option<u64> {
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        // Read only if the group sets a limit, because the kernel gathers these values from all
        // cores.
        let sum = |names: &[&str]| {
            let stat = read("memory.stat").unwrap_or_default();
            names.iter().filter_map(|name| field(&stat, name)).sum::<u64>()
        };
        // The kernel can drop `cache`, but can only swap out the rest of `used`.
        let left =
            |limit: u64, used: u64, cache: u64| limit.saturating_sub(used.saturating_sub(cache));
        match self {
            // A limit of 2^62 or more is the kernel's value for "unlimited". A second limit (memsw)
            // may apply to the sum of memory and swap.
            Self::One => {
                let limit = number("memory.limit_in_bytes").filter(|limit| *limit < 1 << 62)?;
                let cache = sum(&["total_active_file", "total_inactive_file"]);
                let free =
                    left(limit, number("memory.usage_in_bytes")?, cache).saturating_add(swap);
                let both = number("memory.memsw.limit_in_bytes")
                    .zip(number("memory.memsw.usage_in_bytes"));
                Some(both.map_or(free, |(limit, used)| left(limit, used, cache).min(free)))
            }
            Self::Two => {
                let (limit, used) = (number("memory.max")?, number("memory.current")?);
                let free =
                    left(limit, used, sum(&["active_file", "inactive_file", "slab_reclaimable"]));
                let swap_left = number("memory.swap.max")
                    .map(|max| max.saturating_sub(number("memory.swap.current").unwrap_or(0)));
                Some(free.saturating_add(swap_left.unwrap_or(swap).min(swap)))
            }
        }
    }
}

/// Returns the directories of this process's memory groups, innermost first, from
/// `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn folders(cgroup: &str, mounts: &str) -> Vec<(CgroupVersion, PathBuf)> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(inside)) = (parts.next(), parts.next()) else { continue };
        let version = match controllers {
            "" => CgroupVersion::Two,
            list if list.split(',').any(|name| name == "memory") => CgroupVersion::One,
            _ => continue,
        };
        let Some((root, point)) = mounts.lines().find_map(|line| mount(line, version)) else {
            continue;
        };
        // In a container, the mount shows only a subtree; groups above its root cannot be read.
        let Ok(inside) = Path::new(inside).strip_prefix(root) else {
            folders.push((version, point.into()));
            continue;
        };
        folders.extend(
            Path::new(point)
                .join(inside)
                .ancestors()
                .take_while(|path| path.starts_with(point))
                .map(|path| (version, path.into())),
        );
    }
    folders
}

/// Returns the root and the mount point in `line`, if it mounts the memory groups of this version.
fn mount(line: &str, version: CgroupVersion) -> Option<(&str, &str)> {
    let (before, after) = line.split_once(" - ")?;
    let (before, after): (Vec<&str>, Vec<&str>) =
        (before.split(' ').collect(), after.split(' ').collect());
    let wanted = match version {
        CgroupVersion::One => {
            *after.first()? == "cgroup" && after.get(2)?.split(',').any(|option| option == "memory")
        }
        CgroupVersion::Two => *after.first()? == "cgroup2",
    };
    wanted.then_some((*before.get(3)?, *before.get(4)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       24683660 kB\nMemAvailable:   16833476 kB\nSwapFree:\t7 \
            kB\nactive_file 12\nactive 5\n";
        let cases = [
            ("MemAvailable:", Some(16_833_476)),
            ("SwapFree:", Some(7)),
            ("active_file", Some(12)),
            ("active", Some(5)),
            ("Mem", None),
        ];
        for (name, expected) in cases {
            assert_eq!(field(text, name), expected, "{name}");
        }
    }

    #[test]
    fn folders_are_those_of_the_groups_and_all_above_them() {
        let hybrid = "36 32 0:31 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup \
            cgroup rw,memory\n\
                      37 32 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      38 32 0:33 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n";
        let unified =
            "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let container =
            "30 24 0:26 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let (one, two) = (CgroupVersion::One, CgroupVersion::Two);
        let cases = [
            (
                "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/x\n0::/\n",
                hybrid,
                vec![
                    (one, "/sys/fs/cgroup/memory/a/b"),
                    (one, "/sys/fs/cgroup/memory/a"),
                    (one, "/sys/fs/cgroup/memory"),
                    (two, "/sys/fs/cgroup/unified"),
                ],
            ),
            (
                "0::/user.slice/s\n",
                unified,
                vec![
                    (two, "/sys/fs/cgroup/user.slice/s"),
                    (two, "/sys/fs/cgroup/user.slice"),
                    (two, "/sys/fs/cgroup"),
                ],
            ),
            (
                "4:cpu,memory:/docker/ab/c\n",
                container,
                vec![(one, "/sys/fs/cgroup/memory/c"), (one, "/sys/fs/cgroup/memory")],
            ),
            ("4:memory:/elsewhere\n", container, vec![(one, "/sys/fs/cgroup/memory")]),
            ("4:cpu:/a\n", hybrid, vec![]),
            ("nonsense\n", "nonsense\n", vec![]),
        ];
        for (cgroup, mounts, expected) in cases {
            let expected: Vec<(CgroupVersion, PathBuf)> =
                expected.into_iter().map(|(version, path)| (version, path.into())).collect();
            assert_eq!(folders(cgroup, mounts), expected, "{cgroup}");
        }
    }

    // proves P16
    #[test]
    fn what_a_group_allows_is_its_limit_without_what_it_cannot_give_back() {
        type Files = &'static [(&'static str, &'static str)];
        let cases: [(CgroupVersion, Files, Option<u64>); 8] = [
            (CgroupVersion::Two, &[("memory.max", "max\n"), ("memory.current", "5\n")], None),
            (CgroupVersion::Two, &[], None),
            (
                CgroupVersion::Two,
                &[
                    ("memory.max", "1000\n"),
                    ("memory.current", "600\n"),
                    ("memory.swap.max", "0\n"),
                ],
                Some(400),
            ),
            (
                CgroupVersion::Two,
                &[
                    ("memory.max", "1000"),
                    ("memory.current", "600"),
                    ("memory.swap.max", "30"),
                    ("memory.swap.current", "10"),
                    (
                        "memory.stat",
                        "anon 9\nfile 400\nshmem 300\ninactive_file 60\nactive_file \
                         40\nslab_reclaimable 5\n",
                    ),
                ],
                Some(525),
            ),
            (
                CgroupVersion::Two,
                &[("memory.max", "1000"), ("memory.current", "1010"), ("memory.swap.max", "max")],
                Some(100),
            ),
            (
                CgroupVersion::One,
                &[
                    ("memory.limit_in_bytes", "9223372036854771712\n"),
                    ("memory.usage_in_bytes", "5"),
                ],
                None,
            ),
            (
                CgroupVersion::One,
                &[
                    ("memory.limit_in_bytes", "1000"),
                    ("memory.usage_in_bytes", "600"),
                    ("memory.stat", "total_inactive_file 50\n"),
                ],
                Some(550),
            ),
            (
                CgroupVersion::One,
                &[
                    ("memory.limit_in_bytes", "1000"),
                    ("memory.usage_in_bytes", "600"),
                    ("memory.memsw.limit_in_bytes", "1000"),
                    ("memory.memsw.usage_in_bytes", "600"),
                ],
                Some(400),
            ),
        ];
        for (version, files, expected) in cases {
            let read = |name: &str| {
                files.iter().find(|(file, _)| *file == name).map(|(_, text)| (*text).to_owned())
            };
            assert_eq!(version.free(100, read), expected, "{files:?}");
        }
    }

    #[test]
    fn this_process_has_room() {
        let limit = tightest().expect("a machine with /proc");
        assert!(limit.free > 0 && limit.to_string().contains(" are free "), "{limit}");
    }
}
