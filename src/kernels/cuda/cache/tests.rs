use super::entry::HEADER;
use super::*;
use crate::sys::fork::tests::{forked, status_of};
use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;

const CODE: &[u8] = b"\x7fELF and what else a kernel is made of";

fn key(text: &str) -> CacheKey {
    CacheKey::over([text].into_iter())
}

fn place(within: &tempfile::TempDir) -> PathBuf {
    within.path().join("caches/torch_symm")
}

/// A directory with `CODE` under `key("k")`, and the file that holds it.
fn filled(within: &tempfile::TempDir) -> (Folder, PathBuf) {
    let folder = Folder::new(&place(within));
    folder.store(&key("k"), CODE).expect("stored");
    (folder, place(within).join(key("k").file()))
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("it exists").permissions().mode() & 0o7777
}

/// Requests `key("k")` and returns how often the code had to be made.
fn ask(cache: &CacheDir) -> u32 {
    let made = AtomicU32::new(0);
    let make = || {
        made.fetch_add(1, Ordering::Relaxed);
        Ok(CODE.to_vec())
    };
    assert_eq!(kept(cache, &key("k"), make).expect("the code"), CODE);
    made.into_inner()
}

#[test]
fn what_is_stored_is_loaded_by_whoever_comes_later() {
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = Folder::new(&place(&temporary));
    assert_eq!(folder.load(&key("k")), Ok(None));
    assert!(!place(&temporary).exists(), "looking makes nothing");
    let (folder, file) = filled(&temporary);
    assert_eq!(folder.load(&key("k")), Ok(Some(CODE.to_vec())));
    assert_eq!(folder.load(&key("another")), Ok(None));
    assert_eq!((mode(&place(&temporary)), mode(&file)), (0o700, 0o600));
    folder.store(&key("k"), b"").expect("stored again");
    assert_eq!(folder.load(&key("k")), Ok(Some(vec![])));
    assert_eq!(
        std::fs::read_dir(place(&temporary)).expect("a folder").count(),
        1,
        "no temporary file stays"
    );
}

#[test]
fn what_was_not_kept_before_is_not_made() {
    let temporary = tempfile::tempdir().expect("a folder");
    let cache = CacheDir::At(place(&temporary));
    assert_eq!(kept_before(&cache, &key("k")), None);
    assert_eq!(ask(&cache), 1);
    assert_eq!(kept_before(&cache, &key("k")), Some(CODE.to_vec()));
    assert_eq!(kept_before(&CacheDir::Off, &key("k")), None);
}

#[test]
fn each_damaged_byte_and_each_length_is_noticed_and_rebuilt() {
    let temporary = tempfile::tempdir().expect("a folder");
    let (folder, file) = filled(&temporary);
    let cache = CacheDir::At(place(&temporary));
    let good = std::fs::read(&file).expect("the entry");
    assert_eq!(good.len(), HEADER + CODE.len());
    let damaged = (0..good.len()).map(|at| {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        bad
    });
    let truncated = (0..good.len()).map(|length| good[..length].to_vec());
    let longer = [good.iter().copied().chain([0]).collect()];
    for bad in damaged.chain(truncated).chain(longer) {
        std::fs::write(&file, bad).expect("written");
        assert!(folder.load(&key("k")).is_err());
        assert_eq!((ask(&cache), ask(&cache)), (1, 0));
        assert_eq!(std::fs::read(&file).expect("the entry"), good);
    }
    // An entry under another entry's name.
    std::fs::rename(&file, place(&temporary).join(key("another").file())).expect("renamed");
    assert!(folder.load(&key("another")).is_err());
}

// proves P19
#[test]
fn a_link_a_pipe_and_a_file_that_others_may_write_are_refused() {
    let temporary = tempfile::tempdir().expect("a folder");
    let (folder, file) = filled(&temporary);
    let cache = CacheDir::At(place(&temporary));
    let refused = |reason: &str| {
        let error = folder.load(&key("k")).expect_err(reason);
        assert!(error.message.contains(reason), "{error}");
        assert_eq!((ask(&cache), ask(&cache)), (1, 0), "rebuilt in its place");
    };
    let real = temporary.path().join("real");
    std::fs::rename(&file, &real).expect("moved");
    symlink(&real, &file).expect("linked");
    refused("symbolic link");
    assert_eq!(std::fs::read(&real).expect("untouched").len(), HEADER + CODE.len());
    std::fs::remove_file(&file).expect("removed");
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .expect("a pipe");
    refused("is not a file");
    set_permissions(&file, Permissions::from_mode(0o620)).expect("ours");
    refused("mode 620");
    std::fs::remove_file(&file).expect("removed");
    std::fs::create_dir(&file).expect("a folder");
    assert_eq!((ask(&cache), ask(&cache)), (1, 1), "a folder cannot be replaced");
}

#[test]
fn a_folder_may_be_read_by_others_and_not_written() {
    let temporary = tempfile::tempdir().expect("a folder");
    let (folder, _) = filled(&temporary);
    set_permissions(place(&temporary), Permissions::from_mode(0o755)).expect("ours");
    assert_eq!(folder.load(&key("k")), Ok(Some(CODE.to_vec())));
    assert_eq!(mode(&place(&temporary)), 0o755, "left as it is");
    for open in [0o775, 0o757, 0o1777] {
        set_permissions(place(&temporary), Permissions::from_mode(open)).expect("ours");
        let error = folder.load(&key("k")).expect_err("others may write");
        assert!(error.message.contains(&format!("mode {open:o}")), "{error}");
        assert_eq!(folder.store(&key("k"), CODE), Err(error));
        assert_eq!(ask(&CacheDir::At(place(&temporary))), 1);
    }
}

// proves P19
#[test]
fn a_folder_or_an_entry_of_another_user_is_refused() {
    let temporary = tempfile::tempdir().expect("a folder");
    let (folder, file) = filled(&temporary);
    if !rustix::process::geteuid().is_root() {
        let error = Folder::new(Path::new("/")).load(&key("k")).expect_err("root's");
        assert!(error.message.contains("belongs to user 0"), "{error}");
        return;
    }
    for path in [file, place(&temporary)] {
        std::os::unix::fs::chown(&path, Some(65534), None).expect("root may");
        let error = folder.load(&key("k")).expect_err("another's");
        assert!(error.message.contains("belongs to user 65534"), "{error}");
        assert_eq!(ask(&CacheDir::At(place(&temporary))), 1);
    }
}

#[test]
fn without_a_usable_folder_all_is_made_anew() {
    let temporary = tempfile::tempdir().expect("a folder");
    let file = temporary.path().join("file");
    std::fs::write(&file, "").expect("written");
    // A cache below a file, in a directory in which even root cannot create files, without a path,
    // and disabled.
    for cache in [
        CacheDir::At(file.join("torch_symm")),
        CacheDir::At("/proc/self".into()),
        CacheDir::Unknown,
        CacheDir::Off,
    ] {
        assert_eq!((ask(&cache), ask(&cache)), (1, 1), "{cache:?}");
    }
    // Read-only: existing entries are used, and no entry is added.
    let (folder, _) = filled(&temporary);
    set_permissions(place(&temporary), Permissions::from_mode(0o500)).expect("ours");
    assert_eq!(ask(&CacheDir::At(place(&temporary))), 0);
    let stored = folder.store(&key("another"), CODE);
    assert_eq!(stored.is_ok(), rustix::process::geteuid().is_root(), "only root may: {stored:?}");
    set_permissions(place(&temporary), Permissions::from_mode(0o700)).expect("ours");
}

#[test]
fn a_program_that_does_not_compile_is_not_kept() {
    let temporary = tempfile::tempdir().expect("a folder");
    let failed =
        kept(&CacheDir::At(place(&temporary)), &key("k"), || Err(Error::internal("line 3")));
    assert_eq!(failed, Err(Error::internal("line 3")));
    assert_eq!(ask(&CacheDir::At(place(&temporary))), 1);
}

/// Stores and loads two entries alternately; returns true if every load returned the whole entry.
fn work(folder: &Folder, large: &[u8]) -> bool {
    (0..100).all(|turn| {
        let key = key(["k", "l"][turn % 2]);
        folder.store(&key, large).is_ok()
            && folder.load(&key).is_ok_and(|found| found.as_deref() == Some(large))
    })
}

#[test]
fn threads_and_processes_write_the_same_entries_at_once() {
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = Folder::new(&place(&temporary));
    let large: Vec<u8> = (0..100_000_u32).map(|at| (at * 7) as u8).collect();
    let children = [(); 4].map(|()| forked(|| work(&folder, &large)));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| work(&folder, &large))).collect();
        assert!(threads.into_iter().all(|thread| thread.join().expect("no panic")));
    });
    assert_eq!(children.map(status_of), [0; 4]);
    assert_eq!(
        std::fs::read_dir(place(&temporary)).expect("a folder").count(),
        2,
        "no temporary file stays"
    );
}

#[test]
fn everything_that_shapes_the_code_is_in_its_key() {
    let program = Program { name: "a/b", text: "text" };
    let headers = [Header { name: "h.cuh", text: "header" }];
    let options = ["--gpu-architecture=sm_90".to_owned(), "-DX=1".to_owned()];
    let usual = || CacheKey::of((13, 0), &program, &headers, &options);
    let mut keys = [
        usual(),
        CacheKey::of((12, 0), &program, &headers, &options),
        CacheKey::of((13, 0), &Program { text: "text ", ..program }, &headers, &options),
        CacheKey::of((13, 0), &Program { name: "a/c", ..program }, &headers, &options),
        CacheKey::of((13, 0), &program, &[Header { text: "other", ..headers[0] }], &options),
        CacheKey::of((13, 0), &program, &[Header { name: "g.cuh", ..headers[0] }], &options),
        CacheKey::of((13, 0), &program, &[], &options),
        CacheKey::of((13, 0), &program, &headers, &options[..1]),
    ]
    .map(|key| key.file());
    assert_eq!(keys[0], usual().file(), "the same for the same");
    assert!(keys.iter().all(|name| name.len() == 64 + ".cubin".len()));
    keys.sort();
    assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
}
