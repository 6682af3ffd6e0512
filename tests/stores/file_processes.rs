//! Processes as users of a file store: killed at any moment, forked, many at once, on a full disk.
//!
//! Each user is a process of the test program.

use crate::file::place;
use crate::process::{alone, fork, process, role, status_of};
use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;
use symm::error::ErrorKind;
use symm::store::Store;
use symm::store::file::FileStore;

const LARGE: usize = 100_000;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Role {
    path: PathBuf,
    id: u32,
    task: Task,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Task {
    /// Changes its own keys, and prints a line after each round.
    Write,
    /// Adds to one key this many times.
    Add(u32),
    /// Sets a key and is killed.
    Die,
    /// As `Die`, with a forked child that lives longer.
    DieAsParent,
    /// Has no disk space for large values.
    Full,
}

/// Runs as a user if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn user_process() {
    let Some(role) = role::<Role>() else { return };
    let store = FileStore::open(&role.path, 2).unwrap();
    match role.task {
        Task::Write => {
            let [count, large, queue] =
                ["count", "large", "queue"].map(|name| format!("{name} {}", role.id));
            for round in 1i64.. {
                store.queue_push(&queue, round.to_string().as_bytes()).unwrap();
                store.set(&large, &[round as u8; LARGE]).unwrap();
                assert_eq!(store.add(&count, 1).unwrap(), round);
                store.add("all", 1).unwrap();
                // Straight to the file descriptor, because the test harness captures printed text.
                writeln!(std::io::stdout().lock(), "done {round}").unwrap();
            }
        }
        Task::Add(times) => (0..times).for_each(|_| assert!(store.add("n", 1).unwrap() > 0)),
        Task::Die | Task::DieAsParent => {
            store.set("k", b"v").unwrap();
            if matches!(role.task, Task::DieAsParent) {
                let (mut child_runs, mut running) = std::io::pipe().unwrap();
                fork(|| {
                    running.write_all(b"!").unwrap();
                    std::thread::sleep(Duration::from_secs(5));
                    0
                });
                child_runs.read_exact(&mut [0]).unwrap();
            }
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        Task::Full => full(&store, &role.path),
    }
}

fn start(path: &Path, id: u32, task: Task) -> Child {
    let role = Role { path: path.to_owned(), id, task };
    process("file_processes::user_process", &role).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn what_killed_writers_were_told_is_done_is_there() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 2).unwrap();
    let (mut all, mut least) = (0, 0);
    for kill in 0..15u32 {
        let mut writers: Vec<(u32, Child)> = (0..4)
            .map(|writer| (4 * kill + writer, start(&path, 4 * kill + writer, Task::Write)))
            .collect();
        for (_, writer) in &mut writers {
            let mut started = String::new();
            let mut lines = BufReader::with_capacity(1, writer.stdout.as_mut().unwrap());
            while !started.starts_with("done") {
                started.clear();
                assert!(lines.read_line(&mut started).unwrap() > 0, "a writer ended");
            }
        }
        for (index, (_, writer)) in writers.iter_mut().enumerate() {
            // Spreads the kills over the microseconds of an operation.
            std::thread::sleep(Duration::from_micros(
                u64::from(kill * 1777 % 4999) + index as u64 * 313,
            ));
            writer.kill().unwrap();
        }
        for (id, mut writer) in writers {
            let lines = BufReader::new(writer.stdout.take().unwrap()).lines().map_while(Result::ok);
            let rounds = lines.filter_map(|line| line.strip_prefix("done ")?.parse().ok());
            let acknowledged: i64 = rounds.last().unwrap_or(1);
            writer.wait().unwrap();
            let count = store.add(&format!("count {id}"), 0).unwrap();
            assert!(
                (acknowledged..=acknowledged + 1).contains(&count),
                "{acknowledged} were acknowledged, {count} are there"
            );
            let large = store.get(&format!("large {id}"), None).unwrap();
            assert!(large.len() == LARGE && large.iter().all(|byte| *byte == large[0]));
            assert!([count as u8, (count + 1) as u8].contains(&large[0]), "{count} {}", large[0]);
            let queue = format!("queue {id}");
            let length = store.queue_len(&queue).unwrap();
            assert!((count..=count + 1).contains(&length));
            for round in 1..=length {
                assert_eq!(store.queue_pop(&queue, None).unwrap(), round.to_string());
            }
            (all, least) = (all + count, least + acknowledged);
        }
    }
    let total = store.add("all", 0).unwrap();
    assert!((least..=all).contains(&total), "{least} {total} {all}");
    let late = FileStore::open(&path, 2).unwrap();
    assert_eq!(late.add("all", 0).unwrap(), total);
    drop((store, late));
    assert!(!path.exists(), "the last one removes it, whoever was killed before");
}

#[test]
fn what_a_killed_run_has_left_is_started_afresh() {
    let (_folder, path) = place();
    start(&path, 0, Task::Die).wait().unwrap();
    assert!(path.exists());
    assert_eq!(FileStore::open(&path, 2).unwrap().num_keys().unwrap(), 0);
    // A killed user no longer counts as a user, even if its forked child lives.
    start(&path, 0, Task::DieAsParent).wait().unwrap();
    let store = FileStore::open(&path, 2).unwrap();
    assert_eq!(store.num_keys().unwrap(), 0);
    // While one user lives, the keys of exited users stay.
    start(&path, 0, Task::Die).wait().unwrap();
    assert_eq!(store.get("k", None).unwrap(), b"v"[..]);
    assert!(FileStore::open(&path, 2).unwrap().check(&["k"]).unwrap());
}

#[test]
fn processes_that_add_at_once_make_an_exact_sum() {
    let (_folder, path) = place();
    let store = FileStore::open(&path, 5).unwrap();
    let adders: Vec<Child> = (0..4).map(|id| start(&path, id, Task::Add(2000))).collect();
    for mut adder in adders {
        assert!(adder.wait().unwrap().success());
    }
    assert_eq!(store.add("n", 0).unwrap(), 8000);
}

#[test]
fn a_write_that_finds_no_room_changes_nothing() {
    let (_folder, path) = place();
    let output = start(&path, 0, Task::Full).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A limit on the size of files simulates a full disk: a write that exceeds the limit is done in
/// part, and the rest fails.
fn full(store: &FileStore, path: &Path) {
    // SAFETY: ignoring a signal needs no handler.
    assert_ne!(unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) }, libc::SIG_ERR);
    let other = FileStore::open(path, 2).unwrap();
    store.set("k", b"before").unwrap();
    setrlimit(Resource::Fsize, Rlimit { current: Some(1000), maximum: None }).unwrap();
    for _ in 0..2 {
        let error = store.set("k", &[1; 2000]).unwrap_err();
        assert!(
            error.kind == ErrorKind::Internal
                && error.message.contains("write 2034 bytes at byte "),
            "{error}"
        );
        assert!(store.append("k", &[1; 2000]).is_err());
        assert!(store.queue_push("q", &[1; 2000]).is_err());
        for user in [store, &other] {
            assert_eq!(user.get("k", None).unwrap(), b"before"[..]);
            assert!(!user.check(&["q"]).unwrap());
        }
        store.set("small", b"fits").unwrap();
        assert_eq!(other.get("small", None).unwrap(), b"fits"[..]);
    }
}

#[test]
fn a_forked_child_must_open_its_own_and_its_end_changes_nothing() {
    if !alone() {
        return;
    }
    let (_folder, path) = place();
    let store = FileStore::open(&path, 2).unwrap();
    store.set("k", b"v").unwrap();
    let mut store = Some(store);
    let child = fork(|| {
        // Drops the child's reference.
        let refused = store.take().unwrap().get("k", None).is_err_and(|error| {
            error.kind == ErrorKind::Config
                && error
                    .message
                    .ends_with("was opened by the parent of this process, which must open its own")
        });
        let own = FileStore::open(&path, 2)
            .is_ok_and(|own| own.get("k", None).is_ok_and(|value| value == b"v"[..]));
        i32::from(!refused) + 2 * i32::from(!own)
    });
    assert_eq!(status_of(child), 0);
    assert!(path.exists());
    assert!(
        FileStore::open(&path, 9).unwrap().check(&["k"]).unwrap(),
        "not taken for the leftover of a killed run"
    );
    drop(store);
    assert!(!path.exists());
}

#[test]
fn a_child_that_outlives_its_parent_s_store_is_no_user() {
    if !alone() {
        return;
    }
    let (_folder, path) = place();
    let store = FileStore::open(&path, 1).unwrap();
    let child = fork(|| {
        std::thread::sleep(Duration::from_secs(60));
        0
    });
    drop(store);
    assert!(!path.exists());
    kill_process(Pid::from_raw(child).unwrap(), Signal::KILL).unwrap();
    assert_ne!(status_of(child), 0);
}
