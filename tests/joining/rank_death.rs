//! Joining with a rank that is killed before each of its system calls in turn: the others get an
//! error, leave nothing behind, and join again.
//!
//! Each rank is a process of the test program.

use crate::fault_points::{self, Steps, die, monotonic};
use crate::process::{process, role};
use crate::threads::threads_named;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use symm::bootstrap::JoinOptions;
use symm::cta::CtaOptions;
use symm::dtype::SumOrder;
use symm::error::ErrorKind;
use symm::group::Group;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::sys::required;

const RANKS: u32 = 4;
/// Timeout of the join during which a rank is killed.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// Timeout of everything that must work.
const LONG: Duration = Duration::from_secs(30);
/// Number of concurrent jobs for each victim.
const JOBS: usize = 4;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Role {
    dir: PathBuf,
    rank: u32,
    part: Part,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Part {
    /// Kills this rank before this step, or once it has joined.
    Victim { last: u64 },
    /// Joins with the victim, then without it.
    Survivor,
    /// Takes the victim's rank.
    Successor,
}

/// The report of a survivor.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    kind: u8,
    message: String,
    seconds: f64,
    /// Time of the error on the monotonic clock.
    at: u64,
    /// Leftovers of the group; must be empty.
    left: String,
}

/// A group's resources in a process.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Held {
    fn now() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: required::descriptors().1,
            mappings: maps.lines().filter(|line| line.contains("memfd:symm")).count(),
            threads: threads_named("symm"),
        }
    }

    /// Returns the resources in excess of `self`, once threads have had a moment to end.
    fn left(self) -> String {
        let give_up = Instant::now() + Duration::from_secs(2);
        loop {
            let now = Self::now();
            if now == self {
                return String::new();
            }
            if Instant::now() > give_up {
                return format!("{now:?}, before {self:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Returns once `done` is true, which must happen within `LONG`.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let give_up = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < give_up, "waited {LONG:?} for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Role {
    fn join(&self, store: &dyn Store, timeout: Duration) -> symm::error::Result<Group> {
        let options = JoinOptions {
            group: "g".into(),
            rank: self.rank as i32,
            size: RANKS as i32,
            global_ranks: Vec::new(),
            order: SumOrder::Rank,
            ctas: CtaOptions::default(),
            is_default: false,
            timeout: Some(timeout),
        };
        Group::join(store, &options, None)
    }

    fn meet_again(&self, store: &dyn Store) {
        let outcome = self.join(store, LONG).map(drop);
        self.say("again", &outcome.map_err(|error| error.message).err());
    }

    /// Written atomically, because others wait for the file.
    fn say<T: Serialize>(&self, what: &str, value: &T) {
        let (draft, path) = (format!("draft.{}", self.rank), format!("{what}.{}", self.rank));
        std::fs::write(self.dir.join(&draft), serde_json::to_vec(value).unwrap()).unwrap();
        std::fs::rename(self.dir.join(draft), self.dir.join(path)).unwrap();
    }
}

/// Runs as a rank if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn rank_process() {
    let Some(role) = role::<Role>() else { return };
    let store = FileStore::open(&role.dir.join("store"), RANKS).unwrap();
    match role.part {
        Part::Victim { last } => {
            let died = File::create(role.dir.join("died")).unwrap();
            let steps = Steps::until(last, died.try_clone().unwrap()).unwrap();
            let outcome = role.join(&store, TIMEOUT);
            steps.spare();
            role.say("lived", &outcome.as_ref().err().map(|error| error.message.clone()));
            die(&died);
        }
        Part::Survivor => {
            let before = Held::now();
            let started = Instant::now();
            let outcome = role.join(&store, TIMEOUT).map(|group| {
                let give_up = Instant::now() + LONG;
                while group.error().is_none() && Instant::now() < give_up {
                    std::thread::sleep(Duration::from_millis(1));
                }
                group.error()
            });
            let (at, seconds) = (monotonic(), started.elapsed().as_secs_f64());
            let error = outcome.unwrap_or_else(Some).unwrap();
            role.say(
                "report",
                &Report {
                    kind: error.kind as u8,
                    message: error.message,
                    seconds,
                    at,
                    left: before.left(),
                },
            );
            wait_for("the successor", || role.dir.join("go").exists());
            role.meet_again(&store);
            assert_eq!(before.left(), "");
        }
        Part::Successor => role.meet_again(&store),
    }
}

/// A temporary directory, removed at the end; and the processes, killed at the end.
struct Job {
    dir: PathBuf,
    store: FileStore,
    ranks: Vec<Child>,
}

impl Job {
    fn new(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("symm-killed-joining-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let store = FileStore::open(&dir.join("store"), RANKS).unwrap();
        Self { dir, store, ranks: Vec::new() }
    }

    fn start(&mut self, rank: u32, part: Part) -> &mut Child {
        let role = Role { dir: self.dir.clone(), rank, part };
        self.ranks.push(
            process("rank_death::rank_process", &role).stdout(Stdio::null()).spawn().unwrap(),
        );
        self.ranks.last_mut().unwrap()
    }

    fn read<T: serde::de::DeserializeOwned>(&self, name: &str) -> T {
        let path = self.dir.join(name);
        wait_for(name, || path.exists());
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Runs one job whose `victim` is killed before its step `last`; returns true if it reached that
/// step.
fn killed_at(victim: u32, last: u64) -> bool {
    let mut job = Job::new(&format!("{victim}-{last}"));
    // Alternately, all others already wait for the victim, or all start together in any order.
    let awaited = last.is_multiple_of(2);
    let others = (0..RANKS).filter(|rank| *rank != victim);
    for rank in others.clone() {
        job.start(rank, Part::Survivor);
    }
    if awaited {
        wait_for("the survivors' records", || {
            job.store.num_keys().unwrap() >= i64::from(RANKS) - 1
        });
    }
    let child = job.start(victim, Part::Victim { last });
    let pid = child.id();
    child.wait().unwrap();
    let died: u64 = job.read("died");
    let record = job.store.check(&[&format!("symm/g/0/{victim}")]).unwrap();
    let lived = job.dir.join(format!("lived.{victim}")).exists();
    if lived {
        assert_eq!(job.read::<Option<String>>(&format!("lived.{victim}")), None);
    }
    for rank in others.clone() {
        let report: Report = job.read(&format!("report.{rank}"));
        let case = format!(
            "rank {rank} after the end of rank {victim} before its step {last}: {report:?}"
        );
        let named = report.message.contains(&format!("rank {victim} (pid {pid})"));
        if report.kind == ErrorKind::Timeout as u8 {
            // Either no rank saw the victim, or the victim's record is older than some other rank's
            // call and so counts as a leftover.
            assert!(report.message.contains(&format!("rank {victim}")), "{case}");
            // On a busy node the victim may start after the others timed out. A rank that waited a
            // second longer must name it.
            assert!(
                !(awaited && record) || report.at.saturating_sub(died) < 1_000_000_000,
                "{case}"
            );
        } else {
            assert!(report.kind == ErrorKind::Peer as u8 && named, "{case}");
            // A rank that waits for an absent rank polls the others at growing intervals.
            assert!(!awaited || report.at.saturating_sub(died) < 1_000_000_000, "{case}");
        }
        assert!(report.seconds < TIMEOUT.as_secs_f64() + 1.0, "{case}");
        assert_eq!(report.left, "", "{case}");
    }
    job.start(victim, Part::Successor);
    File::create(job.dir.join("go")).unwrap();
    for rank in 0..RANKS {
        let error: Option<String> = job.read(&format!("again.{rank}"));
        assert_eq!(
            error, None,
            "rank {rank} in the group after the one that rank {victim} left before its step {last}"
        );
    }
    for child in job.ranks.iter_mut().skip(RANKS as usize - 1) {
        child.wait().unwrap();
    }
    for child in job.ranks.iter_mut().take(RANKS as usize - 1) {
        assert!(
            child.wait().unwrap().success(),
            "a survivor of the end of rank {victim} before its step {last} keeps something"
        );
    }
    assert_eq!(job.store.num_keys().unwrap(), 0);
    !lived
}

// proves P15
#[test]
fn a_rank_killed_before_any_step_is_named_and_nothing_is_left() {
    if !fault_points::offered() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: this kernel, or what confines this process, does not offer \
             seccomp's listeners"
        );
        return;
    }
    let started = Instant::now();
    let victims: Vec<[AtomicU64; 2]> =
        (0..RANKS).map(|_| [AtomicU64::new(1), AtomicU64::new(0)]).collect();
    std::thread::scope(|scope| {
        for (victim, [next, reached]) in (0..RANKS).zip(&victims) {
            for _ in 0..JOBS {
                scope.spawn(move || {
                    while killed_at(victim, next.fetch_add(1, Ordering::Relaxed)) {
                        reached.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
    });
    let reached: Vec<u64> =
        victims.iter().map(|[_, reached]| reached.load(Ordering::Relaxed)).collect();
    assert!(reached.iter().all(|&steps| steps > 50), "{reached:?} steps of joining");
    eprintln!("steps killed at, by rank: {reached:?}, {:?}", started.elapsed());
}
