//! Jobs of four ranks, which are processes of the test program and meet in a file store.

use crate::process::process;
use crate::stores::eventually;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;
use std::process::{Child, Stdio};
use symm::store::Store;
use symm::store::file::FileStore;
use tempfile::TempDir;

pub(crate) const RANKS: u32 = 4;

/// The store of the job in `dir`.
pub(crate) fn open(dir: &Path) -> FileStore {
    FileStore::open(&dir.join("store"), RANKS).unwrap()
}

/// Writes a file of a job. If the process is killed meanwhile, the file does not appear, not even
/// in part.
pub(crate) fn say(dir: &Path, name: &str, value: &impl Serialize) {
    let draft = dir.join(format!("draft.{}", std::process::id()));
    std::fs::write(&draft, serde_json::to_vec(value).unwrap()).unwrap();
    std::fs::rename(draft, dir.join(name)).unwrap();
}

/// A temporary directory and the ranks' processes, which are killed when the job is dropped.
pub(crate) struct Job {
    /// Through this store the test inspects keys. While it is open, keys of killed ranks stay.
    pub(crate) store: FileStore,
    pub(crate) dir: TempDir,
    pub(crate) ranks: Vec<(u32, Child)>,
}

impl Job {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { store: open(dir.path()), dir, ranks: Vec::new() }
    }

    /// Starts a rank, which runs `test` with `role`.
    pub(crate) fn start(&mut self, test: &str, rank: u32, role: &impl Serialize) {
        let child = process(test, role).stdout(Stdio::null()).spawn().unwrap();
        self.ranks.push((rank, child));
    }

    /// The process that was started last for `rank`.
    pub(crate) fn pid(&self, rank: u32) -> u32 {
        self.ranks.iter().rev().find(|(other, _)| *other == rank).unwrap().1.id()
    }

    /// Waits for the file that a rank has written with [`say`], and removes it.
    pub(crate) fn take<T: DeserializeOwned>(&self, name: &str) -> T {
        let path = self.dir.path().join(name);
        eventually(name, || path.exists());
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    pub(crate) fn keys(&self) -> i64 {
        self.store.num_keys().unwrap()
    }

    /// Kills all ranks, without waiting for their end.
    pub(crate) fn kill(&mut self) {
        for (_, child) in &mut self.ranks {
            let _ = child.kill();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
        for (_, child) in &mut self.ranks {
            let _ = child.wait();
        }
    }
}
