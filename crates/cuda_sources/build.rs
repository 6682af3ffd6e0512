//! Writes the table of the files in `src/kernels/cuda`.

use std::fs::read_dir;
use std::path::{Path, PathBuf};

/// The directory of the kernels, relative to this crate.
const KERNELS: &str = "../../src/kernels/cuda";

/// Returns the entries of `folder` that `wanted` accepts, sorted by name.
fn listing(folder: &Path, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let entries = read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| wanted(path)).collect();
    found.sort();
    found
}

fn ends_in(ending: &'static str) -> impl Fn(&Path) -> bool {
    move |path| path.extension().is_some_and(|found| found == ending)
}

/// Returns the line of the table for the file `path`, which has the name `name`.
fn line(kind: &str, name: &str, path: &Path) -> String {
    let path = path.display();
    format!(
        "    {kind} {{ name: {name:?}, text: \
         include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/{path}\")) }},\n"
    )
}

fn main() {
    let root = Path::new(KERNELS);
    println!("cargo::rerun-if-changed=build.rs");
    // Cargo watches everything below the folder, so it also sees new folders.
    println!("cargo::rerun-if-changed={KERNELS}");
    let name = |path: &Path| {
        path.strip_prefix(root).expect("below the root").with_extension("").display().to_string()
    };
    let headers: String = listing(&root.join("include"), ends_in("cuh"))
        .iter()
        .map(|path| line("Header", &path.file_name().expect("a file").to_string_lossy(), path))
        .collect();
    let mut programs = String::new();
    for folder in listing(root, Path::is_dir) {
        programs.extend(
            listing(&folder, ends_in("cu")).iter().map(|path| line("Program", &name(path), path)),
        );
    }
    let headers = format!("/// Every header.\npub static HEADERS: &[Header] = &[\n{headers}];\n");
    let programs =
        format!("/// Every program.\npub static PROGRAMS: &[Program] = &[\n{programs}];\n");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(format!("{out}/table.rs"), headers + &programs).expect("cargo made the folder");
}
