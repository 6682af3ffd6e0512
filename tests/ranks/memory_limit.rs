//! A memory cgroup that is too small: an error with the numbers, where the kernel would otherwise
//! kill a process. Needs permission to make a cgroup.

use crate::process::{process, role};
use std::io::{Result, Write};
use std::path::{Path, PathBuf};
use symm::error::ErrorKind;
use symm::symm_mem::HOST;
use symm::window::allocations::{allocate, free};

const MIB: usize = 1 << 20;
const LIMIT: usize = 256 * MIB;

/// Runs within the cgroup if the test program was started for that; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn within() {
    let Some(cgroup) = role::<String>() else { return };
    std::fs::write(Path::new(&cgroup).join("cgroup.procs"), std::process::id().to_string())
        .unwrap();
    for _ in 0..2 {
        let error = allocate(HOST, 2 * LIMIT).expect_err("twice the limit");
        assert_eq!(error.kind, ErrorKind::Config);
        let expected =
            format!("out of memory: symmetric memory of the host needs {} bytes, ", 2 * LIMIT);
        let rest = error.message.strip_prefix(&expected).unwrap_or_else(|| panic!("{error}"));
        let (left, of) = rest.split_once(" are free ").unwrap_or_else(|| panic!("{error}"));
        let left: usize = left.parse().unwrap();
        assert!(left > LIMIT / 2 && left <= LIMIT, "{error}");
        assert_eq!(of, format!("in the memory cgroup {cgroup}"));
        // An allocation that fits succeeds, and is freed.
        let address = allocate(HOST, LIMIT / 2).unwrap();
        assert!(
            allocate(HOST, 3 * LIMIT / 4)
                .expect_err("half is taken")
                .message
                .contains("are free in the memory cgroup")
        );
        free(address).unwrap();
    }
}

/// A cgroup within this process's cgroup, with a memory limit and no swap; removed at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let inside = |prefix: &str| {
            own.lines()
                .find_map(|line| line.split_once(':')?.1.strip_prefix(prefix).map(str::to_owned))
        };
        let folder = |root: &str, inside: String| {
            Path::new(root)
                .join(inside.trim_start_matches('/'))
                .join(format!("symm-{}", std::process::id()))
        };
        let (path, limits) = match inside("memory:") {
            // The memory limit first: the limit of memory and swap may not be lower.
            Some(inside) => (
                folder("/sys/fs/cgroup/memory", inside),
                ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"],
            ),
            None => (
                folder("/sys/fs/cgroup", inside(":").unwrap_or_default()),
                ["memory.max", "memory.swap.max"],
            ),
        };
        std::fs::create_dir(&path)?;
        let made = Self(path);
        std::fs::write(made.0.join(limits[0]), LIMIT.to_string())?;
        let swap = if limits[1].starts_with("memory.memsw") { LIMIT } else { 0 };
        // The file does not exist if Linux does not count swap.
        let _ = std::fs::write(made.0.join(limits[1]), swap.to_string());
        Ok(made)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn p16_a_cgroup_that_is_too_small_is_an_error_with_what_is_free() {
    let cgroup = match Cgroup::new() {
        Ok(cgroup) => cgroup,
        Err(error) => {
            let _ =
                writeln!(std::io::stderr(), "skipped: no memory cgroup can be made here: {error}");
            return;
        }
    };
    let output = process("memory_limit::within", &cgroup.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
