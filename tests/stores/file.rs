//! The file store on real files: damage, users that start and end, other processes' files, waits.
//!
//! `file_processes.rs` tests processes as users; the fuzz target `log` tests the reader with
//! arbitrary bytes.

use crate::programs::answer_as_one_store;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use symm::error::{Error, ErrorKind, Result};
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::memory::MemoryStore;
use symm::store::request::{Request, StoreOp};
use symm::sys::byte_lock::{Mode, try_lock, unlock};
use tempfile::TempDir;

const FRONT: usize = 80;

/// A number of users so large that the file is not removed when users leave.
const MANY: u32 = 100;

const QUEUE: &str = "queue";

/// Changes of every kind.
fn program(store: &dyn Store) -> Result<()> {
    store.set("a", b"first")?;
    store.set("a", b"second")?;
    store.add("n", 5)?;
    store.add("n", -7)?;
    store.append("a", b" and more")?;
    store.queue_push(QUEUE, b"x")?;
    store.queue_push(QUEUE, b"y")?;
    store.queue_pop(QUEUE, None)?;
    store.compare_set("c", b"", b"v")?;
    store.compare_set("c", b"other", b"lost")?;
    store.multi_set(&["d", "e", "f"], &[b"1", b"", &[0xff; 40]])?;
    store.delete("e")?;
    store.add("n", 0)?;
    store.set("last", b"acknowledged")
}

/// The bytes of a file on which [`program`] was run.
fn log() -> Vec<u8> {
    let (_folder, path) = place();
    program(&FileStore::open(&path, MANY).unwrap()).unwrap();
    std::fs::read(path).unwrap()
}

/// All keys of `store` with their values, and its queue, which is emptied.
pub(crate) fn contents_of(store: &dyn Store) -> Vec<(String, Vec<u8>)> {
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    let value = |key: String| (key.clone(), store.get(&key, None).unwrap().to_vec());
    let mut all: Vec<_> = keys.into_iter().map(value).collect();
    while let Ok(value) = store.try_queue_pop(QUEUE) {
        all.push((QUEUE.into(), value.to_vec()));
    }
    all
}

/// The content after [`program`].
fn expected() -> Vec<(String, Vec<u8>)> {
    let store = MemoryStore::new();
    program(&store).unwrap();
    contents_of(&store)
}

pub(crate) fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    (folder, path)
}

/// Writes a file with these bytes that only its owner can access.
fn write_private(path: &Path, bytes: &[u8]) {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path).unwrap().write_all(bytes).unwrap();
}

/// The file of a store, opened for changes that bypass the store.
fn raw(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn refusal(path: &Path) -> Error {
    let error = FileStore::open(path, 1).err().expect("refused");
    assert!(error.message.contains(&format!("{path:?}")), "{error}");
    error
}

#[test]
fn a_flipped_byte_anywhere_is_an_error_or_changes_nothing() {
    let ((_folder, path), log, expected) = (place(), log(), expected());
    let mut survived = 0;
    for at in 0..log.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = log.clone();
            damaged[at] ^= flip;
            write_private(&path, &damaged);
            match FileStore::open(&path, MANY) {
                Ok(store) => {
                    survived += 1;
                    assert_eq!(contents_of(&store), expected, "byte {at}");
                    store.set("last", b"changed").unwrap();
                    let other = FileStore::open(&path, MANY).unwrap();
                    assert_eq!(other.get("last", None).unwrap(), b"changed"[..]);
                }
                Err(error) => {
                    assert!(
                        error.kind == ErrorKind::Config
                            && error.message.contains("is damaged at byte "),
                        "{error}"
                    );
                    assert_eq!(std::fs::read(&path).unwrap(), damaged, "nothing is repaired");
                }
            }
        }
    }
    // The store survives only damage to one of its two commit slots, which have 24 bytes each.
    assert_eq!(survived, 2 * 24 * 3);
}

#[test]
fn what_stands_behind_the_end_does_not_count() {
    let ((_folder, path), log) = (place(), log());
    for tail in [&log[FRONT..], &[0; 100], &[0xff; 100], &log[..]] {
        write_private(&path, &[&log[..], tail].concat());
        assert_eq!(contents_of(&FileStore::open(&path, MANY).unwrap()), expected());
    }
}

#[test]
fn a_file_cut_short_is_an_error_and_stays_as_it_is() {
    let ((_folder, path), log) = (place(), log());
    for length in 1..log.len() {
        write_private(&path, &log[..length]);
        let error = FileStore::open(&path, MANY).err().unwrap();
        assert_eq!(error.message, refusal(&path).message);
        assert!(
            error.kind == ErrorKind::Config
                && error.message.contains(&format!("is damaged at byte {length}: it ends")),
            "{error}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), &log[..length]);
    }
}

#[test]
fn cut_short_while_in_use_is_an_error_for_those_who_come() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, MANY).unwrap();
    program(&store).unwrap();
    raw(&path).set_len(100).unwrap();
    assert!(refusal(&path).message.contains("is damaged at byte 100"));
    assert_eq!(store.get("last", None).unwrap(), b"acknowledged"[..]);
    raw(&path).set_len(0).unwrap();
    assert!(refusal(&path).message.contains("is damaged at byte 0"), "in use, so not new");
    assert!(store.set("k", b"").unwrap_err().message.contains("is damaged at byte 0"));
}

/// Another user has exited in its last operation: after the first `case` bytes of its record, or
/// after the whole record and a part of the slot.
#[test]
fn a_writer_dead_at_any_byte_loses_nothing_that_was_acknowledged() {
    let mut case = 0;
    loop {
        let (_folder, path) = place();
        let store = FileStore::open(&path, MANY).unwrap();
        program(&store).unwrap();
        let victim = FileStore::open(&path, MANY).unwrap();
        assert!(!store.check(&["torn"]).unwrap());
        let before = std::fs::read(&path).unwrap();
        victim.set("torn", b"by its writer").unwrap();
        let after = std::fs::read(&path).unwrap();
        // The victim must neither see how the file changes nor leave the store when it is dropped.
        std::mem::forget(victim);
        let (record, slot) = (after.len() - before.len(), 24);
        let mut torn = before.clone();
        torn.extend(&after[before.len()..][..case.min(record)]);
        if case > record {
            let start = if before[32..56] == after[32..56] { 56 } else { 32 };
            let count = case - record;
            torn[start..start + count].copy_from_slice(&after[start..start + count]);
        }
        write_private(&path, &torn);

        let fresh = FileStore::open(&path, MANY).unwrap();
        for user in [&store, &fresh] {
            let there = user.check(&["torn"]).unwrap();
            assert!(there || case < record + slot, "acknowledged, case {case}");
            assert!(!there || case > record, "case {case}");
            assert_eq!(user.get("last", None).unwrap(), b"acknowledged"[..]);
        }
        let there = store.check(&["torn"]).unwrap();
        for user in [&store, &fresh] {
            user.add("n", 100).unwrap();
        }
        let late = FileStore::open(&path, MANY).unwrap();
        assert_eq!(late.check(&["torn"]).unwrap(), there);
        late.delete("torn").unwrap();
        store.add("n", -200).unwrap();
        assert_eq!(contents_of(&late), expected(), "case {case}");
        if case == record + slot {
            return;
        }
        case += 1;
    }
}

#[test]
fn a_file_whose_first_user_died_while_making_it_is_new() {
    let ((_folder, path), log) = (place(), log());
    for length in 0..=FRONT {
        let mut part = log[..length].to_vec();
        part.iter_mut().take(8).for_each(|byte| *byte = 0);
        write_private(&path, &part);
        let store = FileStore::open(&path, 1).unwrap();
        assert_eq!(store.num_keys().unwrap(), 0);
        store.set("k", b"v").unwrap();
    }
}

#[test]
fn the_last_of_all_users_removes_the_file() {
    let (_folder, path) = place();
    let first = FileStore::open(&path, 2).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let clone = first.clone();
    first.set("k", b"v").unwrap();
    drop(first);
    let second = FileStore::open(&path, 2).unwrap();
    assert_eq!(second.get("k", None).unwrap(), b"v"[..]);
    assert_eq!(second.path(), path);
    drop(second);
    assert!(path.exists());
    drop(clone);
    assert!(!path.exists());
    // A value that a user sets before it leaves stays for later users.
    FileStore::open(&path, 2).unwrap().set("k", b"v").unwrap();
    let late = FileStore::open(&path, 2).unwrap();
    assert_eq!(late.get("k", None).unwrap(), b"v"[..]);
    drop(late);
    assert!(!path.exists());
}

#[test]
fn another_file_at_the_path_is_not_removed_and_a_wait_says_so() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 1).unwrap();
    std::fs::remove_file(&path).unwrap();
    write_private(&path, b"another's");
    let error = store.get("k", Some(Duration::from_secs(10))).unwrap_err();
    assert!(
        error.kind == ErrorKind::Config && error.message.contains("was removed or replaced"),
        "{error}"
    );
    drop(store);
    assert_eq!(std::fs::read(&path).unwrap(), b"another's");
    let expected = "is damaged at byte 0: it does not begin like the log of a store";
    assert!(refusal(&path).message.contains(expected));
    // A log that is copied over the file.
    std::fs::remove_file(&path).unwrap();
    let store = FileStore::open(&path, 1).unwrap();
    write_private(&path, &log());
    for outcome in [store.set("k", b"v"), store.get("last", None).map(drop)] {
        assert!(outcome.unwrap_err().message.contains("was started afresh by another run"));
    }
}

#[test]
fn a_write_to_a_file_that_was_removed_fails() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 2).unwrap();
    std::fs::remove_file(&path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    // A write checks the file at most every 100 ms.
    let error = loop {
        assert!(Instant::now() < deadline, "no write fails");
        match store.set("k", b"v") {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error,
        }
    };
    assert!(
        error.kind == ErrorKind::Config && error.message.contains("was removed or replaced"),
        "{error}"
    );
    assert!(store.add("n", 1).is_err());
}

// proves P19
#[test]
fn only_a_private_file_in_a_safe_folder_is_opened() {
    let (folder, path) = place();
    let target = folder.path().join("target");
    write_private(&target, b"");
    symlink(&target, &path).unwrap();
    assert!(refusal(&path).message.ends_with("it is a symbolic link"));
    std::fs::remove_file(&path).unwrap();
    symlink(folder.path().join("nowhere"), &path).unwrap();
    assert!(refusal(&path).message.ends_with("it is a symbolic link"));
    std::fs::remove_file(&path).unwrap();

    std::fs::hard_link(&target, &path).unwrap();
    assert!(refusal(&path).message.ends_with("it has 2 names (hard links)"));
    std::fs::remove_file(&target).unwrap();
    for mode in [0o644, 0o660, 0o601] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        assert!(refusal(&path).message.contains(&format!("it has mode {mode:04o}")));
    }
    std::fs::remove_file(&path).unwrap();

    std::fs::create_dir(&path).unwrap();
    assert!(refusal(&path).message.ends_with("it is a folder"));
    let inside = path.join("store");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(refusal(&inside).message.contains("has mode 0777, so that anybody can exchange"));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o1777)).unwrap();
    drop(FileStore::open(&inside, 1).unwrap());
    assert!(refusal(&path.join("missing/store")).message.contains("missing\" does not exist"));
    rustix::fs::mknodat(rustix::fs::CWD, &inside, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    assert!(refusal(&inside).message.ends_with("it is not a regular file"));
    for path in ["", "/"] {
        assert_eq!(refusal(Path::new(path)).kind, ErrorKind::Config);
    }
}

#[test]
fn a_wait_hears_of_a_key_soon_and_names_it_when_it_does_not_come() {
    let (_folder, path) = place();
    let [first, second] = [(); 2].map(|()| FileStore::open(&path, 2).unwrap());
    // A busy node may keep a waiter from its core, but not each time.
    let late = |key: &str| {
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                first.get(key, None).unwrap();
                Instant::now()
            });
            std::thread::sleep(Duration::from_millis(300));
            let set = Instant::now();
            second.set(key, b"").unwrap();
            waiter.join().unwrap().saturating_duration_since(set)
        })
    };
    let mut keys = std::iter::once("k".to_owned()).chain((1..20).map(|turn| format!("k{turn}")));
    assert!(keys.any(|key| late(&key) < Duration::from_millis(50)));
    let started = Instant::now();
    let error = first.wait(&["k", "absent"], Some(Duration::from_millis(50))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout);
    assert_eq!(
        error.message,
        format!(
            "wait timeout after 50 ms: 1 key of 2 did not come: \"absent\" (file store {path:?})"
        )
    );
    assert!((50..5000).contains(&started.elapsed().as_millis()));
    assert_eq!(first.queue_pop("q", Some(Duration::ZERO)).unwrap_err().kind, ErrorKind::Timeout);
}

#[test]
fn users_who_come_and_go_at_once_never_meet_a_removed_file() {
    let (_folder, path) = place();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for round in 0..200 {
                    let store = FileStore::open(path, 1).unwrap();
                    let key = format!("{thread}/{round}");
                    store.set(&key, b"").unwrap();
                    // A process that opens the store now uses the same file.
                    assert!(FileStore::open(path, 1).unwrap().check(&[&key]).unwrap());
                }
            });
        }
    });
    assert!(!path.exists());
}

#[test]
fn reads_need_no_lock_and_writes_say_who_has_it() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 1).unwrap();
    store.set("k", b"v").unwrap();
    let file = raw(&path);
    assert!(try_lock(file.as_fd(), 1 << 62, Mode::Exclusive).unwrap());
    assert_eq!(store.get("k", None).unwrap(), b"v"[..]);
    let error = store
        .call(&Request::new(StoreOp::Set, vec!["k"], vec![b"w"]), Some(Duration::from_millis(20)))
        .unwrap_err();
    let pid = std::process::id();
    let holder = format!("the lock of the file store {path:?} is held by process {pid} (alive, ");
    assert!(error.message.starts_with(&holder), "{error}");
    assert_eq!(error.kind, ErrorKind::Timeout);
    unlock(file.as_fd(), 1 << 62).unwrap();
    store.set("k", b"w").unwrap();
}

#[test]
fn what_changes_nothing_is_not_written() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 1).unwrap();
    program(&store).unwrap();
    let before = std::fs::read(&path).unwrap();
    store.delete("absent").unwrap();
    store.compare_set("c", b"not this", b"w").unwrap();
    store.compare_set("absent", b"something", b"w").unwrap();
    store.add("n", 0).unwrap();
    assert_eq!(store.add("a", 1).unwrap_err().kind, ErrorKind::Value);
    assert_eq!(store.try_queue_pop("absent").unwrap_err().kind, ErrorKind::QueueEmpty);
    assert_eq!(
        store.queue_pop("absent", Some(Duration::from_millis(5))).unwrap_err().kind,
        ErrorKind::Timeout
    );
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(store.add("new", 0).unwrap(), 0);
    assert!(FileStore::open(&path, 1).unwrap().check(&["new"]).unwrap());
}

#[test]
fn large_values_and_many_keys() {
    let (_folder, path) = place();
    let [first, second] = [(); 2].map(|()| FileStore::open(&path, 2).unwrap());
    let large: Vec<u8> = (0..64 << 20).map(|index: u32| (index >> 8) as u8).collect();
    first.set("large", &large).unwrap();
    assert!(second.get("large", None).unwrap() == large);
    let error = first.multi_set(&["a", "b"], &[&large, &large]).unwrap_err();
    assert!(
        error.kind == ErrorKind::Value
            && error.message.contains("a file store takes at most 134217728 at once"),
        "{error}"
    );
    let names: Vec<String> = (0..1000).map(|index| format!("key {index}")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    for key in &keys {
        first.set(key, key.as_bytes()).unwrap();
    }
    assert!(second.check(&keys).unwrap());
    let values = second.multi_get(&keys, None).unwrap();
    assert!(values.iter().zip(&keys).all(|(value, key)| value == key.as_bytes()));
    assert_eq!(second.num_keys().unwrap(), 1001);
}

#[test]
fn a_damaged_record_is_named_to_a_user_who_reads_it() {
    let (_folder, path) = place();
    let [first, second] = [(); 2].map(|()| FileStore::open(&path, 2).unwrap());
    let at = std::fs::metadata(&path).unwrap().len();
    first.set("k", b"value").unwrap();
    raw(&path).write_all_at(b"?", at + 12).unwrap();
    let error = second.get("k", None).unwrap_err();
    assert!(
        error.message.contains(&format!("is damaged at byte {at}: record 2 is not whole")),
        "{error}"
    );
    assert_eq!(first.get("k", None).unwrap(), b"value"[..]);
}

#[test]
fn three_users_of_a_file_answer_as_one_store_in_memory() {
    answer_as_one_store(100, || {
        let (folder, path) = place();
        move || {
            let _stays = &folder;
            FileStore::open(&path, MANY).unwrap()
        }
    });
}
