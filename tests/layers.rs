//! The module tree has a direction, which `src/lib.rs` draws, and no two modules import each other.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The height of a module, which may use lower modules and others of the same height.
fn height(module: &str) -> u32 {
    match module {
        "error" | "cta" | "dtype" | "lock" | "rms_norm" | "op" | "rank" | "completion" => 0,
        "config" | "sys" => 1,
        "mem" | "kernels" | "store" | "topo" | "node_map" => 2,
        "sync" | "transport" => 3,
        "control" => 4,
        "bootstrap" | "exit_watch" | "symm_mem" => 5,
        "coll" => 6,
        "trace" | "fused" | "window" => 7,
        "health" => 8,
        "messages" | "internode" => 9,
        "call_queue" => 10,
        "group" => 11,
        "bridge" => 12,
        other => panic!("module {other} has no place yet: add it to tests/layers.rs"),
    }
}

/// A directory, named relative to the root of the repository.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// All files in and below `folder` with one of these extensions.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if path
            .extension()
            .is_some_and(|extension| extensions.iter().any(|known| extension == *known))
        {
            found.push(path);
        }
    }
    found
}

/// The module path of a source file: `coll::cuda::plan`.
fn module(file: &Path) -> Vec<String> {
    let inside = file.strip_prefix(folder("src")).unwrap().with_extension("");
    let mut parts: Vec<String> =
        inside.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

/// Collects the names that a `use` of `tree` imports after `path`, with braces expanded.
fn names(path: &[String], tree: &str, found: &mut Vec<Vec<String>>) {
    let (head, inner) = tree
        .split_once('{')
        .map_or((tree, None), |(head, rest)| (head, Some(rest.rsplit_once('}').unwrap().0)));
    let segments = head
        .split("::")
        .map(|segment| segment.split(" as ").next().unwrap().trim())
        .filter(|segment| !segment.is_empty());
    let path: Vec<String> = path.iter().cloned().chain(segments.map(str::to_owned)).collect();
    let Some(inner) = inner else { return found.push(path) };
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names(&path, &inner[begin..at], found);
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// The modules among `all` that `module` imports, without its own submodules and without imports of
/// its tests.
fn imports(module: &[String], text: &str, all: &BTreeSet<Vec<String>>) -> BTreeSet<Vec<String>> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let mut found = Vec::new();
    for statement in text.split("\nuse ").skip(1) {
        names(&[], statement.split(';').next().unwrap(), &mut found);
    }
    let absolute = |path: Vec<String>| -> Option<Vec<String>> {
        let ups = path.iter().take_while(|segment| *segment == "super").count();
        match path[0].as_str() {
            "crate" => Some(path[1..].to_vec()),
            "super" => Some([&module[..module.len() - ups], &path[ups..]].concat()),
            _ => None,
        }
    };
    let known = |path: Vec<String>| {
        (1..=path.len()).rev().map(|n| path[..n].to_vec()).find(|prefix| all.contains(prefix))
    };
    found
        .into_iter()
        .filter_map(absolute)
        .filter_map(known)
        .filter(|other| !module.starts_with(other) && !other.starts_with(module))
        .collect()
}

#[test]
fn no_two_modules_import_each_other() {
    let files = files(&folder("src"), &["rs"]);
    let texts: BTreeMap<Vec<String>, String> = files
        .iter()
        .map(|file| (module(file), std::fs::read_to_string(file).unwrap()))
        .filter(|(module, _)| !module.is_empty())
        .collect();
    let all: BTreeSet<Vec<String>> = texts.keys().cloned().collect();
    let mut rest: BTreeMap<Vec<String>, BTreeSet<Vec<String>>> = texts
        .iter()
        .filter(|(module, _)| !module.contains(&"tests".into()))
        .map(|(module, text)| (module.clone(), imports(module, text, &all)))
        .collect();
    // A module that imports no module of `rest` is not part of a cycle.
    loop {
        let left = rest.len();
        let free: Vec<_> = rest
            .iter()
            .filter(|(_, used)| !used.iter().any(|other| rest.contains_key(other)))
            .map(|(module, _)| module.clone())
            .collect();
        free.iter().for_each(|module| drop(rest.remove(module)));
        if rest.is_empty() {
            return;
        }
        if rest.len() == left {
            let lines: Vec<String> = rest
                .iter()
                .map(|(module, used)| {
                    let used: Vec<String> = used
                        .iter()
                        .filter(|other| rest.contains_key(*other))
                        .map(|other| other.join("::"))
                        .collect();
                    format!("{} imports {}", module.join("::"), used.join(", "))
                })
                .collect();
            panic!("in or above a circle of imports:\n{}", lines.join("\n"));
        }
    }
}

#[test]
fn the_drawing_of_the_layers_has_every_module_and_no_other() {
    let page = std::fs::read_to_string(folder("docs/design/index.md")).unwrap();
    let drawing =
        page.split("```mermaid\nflowchart TB").nth(1).unwrap().split("```").next().unwrap();
    let leaves = drawing.split_once("leaf[\"").unwrap().1.split('"').next().unwrap();
    // A box is written `name["text"]`; `sys` and `config` share one. `coll` has boxes for its
    // parts.
    let boxes = drawing.split_whitespace().filter_map(|word| Some(word.split_once("[\"")?.0));
    let others = ["", "py", "cpp", "leaf", "cpu", "cuda", "two_level", "cost"];
    let drawn = boxes
        .filter(|name| !others.contains(name))
        .chain(["coll", "config"])
        .chain(leaves.split(", "));
    let files = files(&folder("src"), &["rs"]);
    let modules: BTreeSet<String> =
        files.iter().filter_map(|file| module(file).into_iter().next()).collect();
    assert_eq!(drawn.map(str::to_owned).collect::<BTreeSet<_>>(), modules);
}

#[test]
fn files_are_short() {
    let folders = ["src", "torch_backend", "python/torch_symm"];
    let files: Vec<_> = folders
        .iter()
        .flat_map(|name| files(&folder(name), &["rs", "cpp", "hpp", "cu", "cuh", "py"]))
        .collect();
    let lengths: Vec<(usize, &PathBuf)> = files
        .iter()
        .map(|file| (std::fs::read_to_string(file).unwrap().lines().count(), file))
        .collect();
    let mean = lengths.iter().map(|(lines, _)| lines).sum::<usize>() / lengths.len();
    assert!(mean <= 250, "a file has {mean} lines on average; 250 are enough");
    let long: Vec<_> = lengths.iter().filter(|(lines, _)| *lines > 500).collect();
    assert!(long.is_empty(), "files of more than 500 lines want to be split: {long:?}");
}

/// `cargo fmt` leaves comments, macros and C++ as they are. Rows of tables may be longer.
#[test]
fn lines_have_at_most_100_columns() {
    let folders =
        ["src", "torch_backend", "cpp", "tests", "benches", "crates", "fuzz", "packaging"];
    for file in folders
        .iter()
        .flat_map(|name| files(&folder(name), &["rs", "cpp", "hpp", "h", "cu", "cuh"]))
        .filter(|file| !file.components().any(|part| part.as_os_str() == "target"))
    {
        for (number, line) in std::fs::read_to_string(&file).unwrap().lines().enumerate() {
            let row = line.trim_start_matches(['/', '!', ' ']).starts_with('|');
            let columns = line.chars().count();
            let place = format!("{}:{}", file.display(), number + 1);
            assert!(columns <= 100 || row, "{place}: {columns} columns; 100 are the most");
        }
    }
}

#[test]
fn no_module_looks_up() {
    let root = folder("src");
    let files = files(&folder("src"), &["rs"]);
    for file in files {
        let place = file.strip_prefix(&root).unwrap();
        let module =
            place.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        if module == "lib" {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        for piece in text.split("crate::").skip(1) {
            let used: String =
                piece.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(
                height(&used) <= height(&module),
                "{}: {module} uses {used}, which stands above it",
                place.display()
            );
        }
        let free = matches!(module.as_str(), "config") || !text.contains("std::env::var");
        assert!(free, "{}: only config.rs reads the environment", place.display());
    }
}
