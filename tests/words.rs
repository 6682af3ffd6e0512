//! One meaning a word, and the field's word where there is one: `docs/glossary.md` has them. Words that were replaced stay out.
#![allow(missing_docs, clippy::unwrap_used)]

mod tree;

/// A part of a name, or two that follow each other, and what to say instead.
const REPLACED: &[(&str, &str)] = &[
    ("board", "control block"),
    ("boards", "control blocks"),
    ("plane", "communicator"),
    ("ledger", "launch log"),
    ("gate", "zero-copy handshake"),
    ("gates", "zero-copy handshakes"),
    ("gated", "zero-copy"),
    ("marked slot", "sentinel slot"),
    ("marked slots", "sentinel slots"),
    ("marked round", "sentinel round"),
    ("two stage", "rsag_staged"),
    ("parcel", "message"),
    ("parcels", "messages"),
    ("bury", "release what a dead rank had"),
    ("buried", "released"),
    ("casualty", "dead rank"),
    ("epitaph", "last call of a dead rank"),
    ("inscription", "text of a call site"),
    ("crowd", "load generator"),
    ("stranger", "unidentified peer, or hostile peer in a test"),
    ("strangers", "unidentified peers, or hostile peers in a test"),
    ("punisher", "soak test"),
];

/// Names that torch or Python chose, and tests of what words mean elsewhere.
const ELSEWHERE: &[&str] = &[
    "src/coll/cuda/former_names.rs",
    "tests/words.rs",
    "tests/python/test_docs.py",
    "tests/torch/gates.py",
    "tests/torch/server.py",
    "tests/torch/test_upstream.py",
    "tests/python/test_store_waits.py",
];

/// The parts of the names in a line, in lower case: "sentinel_slot" has two, and so has "SentinelSlot".
fn parts(line: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut before = ' ';
    for c in line.chars() {
        let begins = !before.is_alphabetic() || (c.is_uppercase() && before.is_lowercase());
        if c.is_alphabetic() {
            if begins {
                found.push(String::new());
            }
            if let Some(last) = found.last_mut() {
                last.extend(c.to_lowercase());
            }
        }
        before = c;
    }
    found
}

/// Which replaced word a line has, with what to say instead.
fn replaced(line: &str) -> Option<&'static (&'static str, &'static str)> {
    let parts = parts(line);
    REPLACED.iter().find(|(word, _)| {
        let words: Vec<&str> = word.split(' ').collect();
        parts.windows(words.len()).any(|names| names.iter().eq(words.iter()))
    })
}

#[test]
fn replaced_words_stay_out() {
    let folders = ["src", "cpp", "crates", "torch_backend", "python", "tests", "benches", "fuzz", "examples"];
    let files: Vec<_> = folders.iter().flat_map(|folder| tree::files(folder, &["rs", "cpp", "hpp", "cu", "cuh", "py", "pyi"])).collect();
    assert!(files.len() > 400, "only {} files were found", files.len());
    let mut found = Vec::new();
    for file in files {
        let name = file.strip_prefix(tree::root()).unwrap().display().to_string();
        if ELSEWHERE.contains(&name.as_str()) {
            continue;
        }
        for (number, line) in (1..).zip(std::fs::read_to_string(&file).unwrap().lines()) {
            if let Some((word, instead)) = replaced(line) {
                found.push(format!("{name}:{number}: \"{word}\"; say {instead}"));
            }
        }
    }
    assert!(found.is_empty(), "words that were replaced:\n{}", found.join("\n"));
}

#[test]
fn names_are_taken_apart() {
    assert_eq!(parts("let MarkedSlot = two_stage(x2); // A board."), ["let", "marked", "slot", "two", "stage", "x", "a", "board"]);
    assert!(replaced("on_marked_slots").is_some() && replaced("MarkedRound").is_some() && replaced("the board's").is_some());
    assert!(replaced("aggregated, benchmarked, onboard, KeyboardInterrupt").is_none());
}
