//! Files of the repository, for tests that read it.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// Root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files in `folder`, which is named from the root, and below it that have one of these extensions.
pub(crate) fn files(folder: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    add(&root().join(folder), extensions, &mut found);
    found
}

fn add(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add(&path, extensions, found);
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known)) {
            found.push(path);
        }
    }
}
