//! The module tree has a direction: `bridge → group → {engine, watch, trace, coll, p2p, boot} → {sync, kernels, topo, mem, store} → sys → leaves`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

/// Modules by height; a module may use those below it, and its own kind.
fn height(module: &str) -> u32 {
    match module {
        "error" | "dtype" | "op" | "rank" | "config" | "done" => 0,
        "sys" => 1,
        "mem" | "kernels" | "store" | "topo" => 2,
        "sync" => 3,
        "boot" | "watch" | "coll" => 4,
        "p2p" | "trace" => 5,
        "engine" => 6,
        "group" => 7,
        "bridge" => 8,
        other => panic!("module {other} has no place yet: add it to tests/layers.rs"),
    }
}

fn sources(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_module_looks_up() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    for file in files {
        let place = file.strip_prefix(&root).unwrap();
        let module = place.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        if module == "lib" {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        for piece in text.split("crate::").skip(1) {
            let used: String = piece.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(height(&used) <= height(&module), "{}: {module} uses {used}, which stands above it", place.display());
        }
        let free = matches!(module.as_str(), "config") || !text.contains("std::env::var");
        assert!(free, "{}: only config.rs reads the environment", place.display());
    }
}
