//! Joining with a rank that is killed before each of its system calls in turn: the others get an
//! error, leave nothing behind, and join again.

use crate::fault_points::{self, Steps, die, monotonic};
use crate::jobs::{Job, RANKS, open, say};
use crate::process::role;
use crate::stores::{LONG, eventually};
use crate::threads::threads_named;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use symm::bootstrap::JoinOptions;
use symm::cta::CtaOptions;
use symm::dtype::SumOrder;
use symm::error::ErrorKind;
use symm::group::Group;
use symm::store::Store;
use symm::sys::required;

/// Timeout of the join during which a rank is killed.
const TIMEOUT: Duration = Duration::from_secs(4);
/// Nanoseconds within which ranks that wait for an absent rank notice an exit. They poll the others
/// at intervals that double up to 800 ms, and may get their core late.
const SOON_NS: u64 = 3_000_000_000;
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
    /// Is killed before its step `last`, or after the join if the join has fewer steps.
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

/// Numbers of resources that this process holds. Some belong to its group.
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

    fn say(&self, what: &str, value: &impl Serialize) {
        say(&self.dir, &format!("{what}.{}", self.rank), value);
    }
}

/// Runs as a rank if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn rank_process() {
    let Some(role) = role::<Role>() else { return };
    let store = open(&role.dir);
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
            let (kind, message, left) = (error.kind as u8, error.message, before.left());
            role.say("report", &Report { kind, message, seconds, at, left });
            eventually("the successor", || role.dir.join("go").exists());
            role.meet_again(&store);
            assert_eq!(before.left(), "");
        }
        Part::Successor => role.meet_again(&store),
    }
}

/// Runs one job whose `victim` is killed before its step `last`. Returns true if it reached that
/// step, and the number of ranks whose error says that it was killed.
fn killed_at(victim: u32, last: u64) -> (bool, u64) {
    let mut job = Job::new();
    let dir = job.dir.path().to_owned();
    let start = |job: &mut Job, rank: u32, part| {
        job.start("rank_death::rank_process", rank, &Role { dir: dir.clone(), rank, part });
    };
    // If `last` is even, the other ranks already wait for the victim. If it is odd, all ranks start
    // together.
    let awaited = last.is_multiple_of(2);
    let others = (0..RANKS).filter(|rank| *rank != victim);
    for rank in others.clone() {
        start(&mut job, rank, Part::Survivor);
    }
    if awaited {
        eventually("the survivors' records", || job.keys() >= i64::from(RANKS) - 1);
    }
    start(&mut job, victim, Part::Victim { last });
    let pid = job.pid(victim);
    job.ranks.pop().unwrap().1.wait().unwrap();
    let died: u64 = job.take("died");
    let record = job.store.check(&[&format!("symm/g/0/{victim}")]).unwrap();
    let lived = dir.join(format!("lived.{victim}")).exists();
    if lived {
        assert_eq!(job.take::<Option<String>>(&format!("lived.{victim}")), None);
    }
    let killed = format!(
        "rank {victim} (pid {pid}) ended while joining group \"g\" of 4 ranks: killed by signal 9 \
         (SIGKILL)"
    );
    let mut told = 0;
    for rank in others {
        let report: Report = job.take(&format!("report.{rank}"));
        told += u64::from(report.message == killed);
        let case = format!(
            "rank {rank} after the end of rank {victim} before its step {last}: {report:?}"
        );
        let named = report.message.contains(&format!("rank {victim} (pid {pid})"));
        if report.kind == ErrorKind::Timeout as u8 {
            // Either no rank saw the victim, or the victim's record is older than some other rank's
            // call and so counts as a leftover.
            assert!(report.message.contains(&format!("rank {victim}")), "{case}");
            // On a busy node the victim may start after the others timed out. But a rank that still
            // waits 3 s after the victim's exit must not time out: it must report the exit.
            assert!(!(awaited && record) || report.at.saturating_sub(died) < SOON_NS, "{case}");
        } else {
            assert!(report.kind == ErrorKind::Peer as u8 && named, "{case}");
            // A rank that waits for an absent rank polls the others at growing intervals, so it may
            // notice an exit later.
            assert!(!awaited || report.at.saturating_sub(died) < SOON_NS, "{case}");
        }
        assert!(report.seconds < TIMEOUT.as_secs_f64() + 3.0, "{case}");
        assert_eq!(report.left, "", "{case}");
    }
    start(&mut job, victim, Part::Successor);
    File::create(dir.join("go")).unwrap();
    for rank in 0..RANKS {
        let error: Option<String> = job.take(&format!("again.{rank}"));
        assert_eq!(
            error, None,
            "rank {rank} in the group after the one that rank {victim} left before its step {last}"
        );
    }
    for (rank, child) in &mut job.ranks {
        assert!(
            child.wait().unwrap().success(),
            "rank {rank} keeps something after the end of rank {victim} before its step {last}"
        );
    }
    assert_eq!(job.keys(), 0);
    (!lived, told)
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
    // For each victim: the number of steps tried, the number of steps reached, and the number of
    // errors that say that the victim was killed.
    let victims: Vec<[AtomicU64; 3]> = (0..RANKS).map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        for (victim, [next, reached, told]) in (0..RANKS).zip(&victims) {
            for _ in 0..JOBS {
                scope.spawn(move || {
                    loop {
                        let step = next.fetch_add(1, Ordering::Relaxed) + 1;
                        let (killed, ranks) = killed_at(victim, step);
                        told.fetch_add(ranks, Ordering::Relaxed);
                        if !killed {
                            break;
                        }
                        reached.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
    });
    let count = |index: usize| -> Vec<u64> {
        victims.iter().map(|counts| counts[index].load(Ordering::Relaxed)).collect()
    };
    let (reached, told) = (count(1), count(2));
    assert!(reached.iter().all(|&steps| steps > 50), "{reached:?} steps of joining");
    assert!(told.iter().all(|&ranks| ranks > 0), "{told:?} ranks say that the victim was killed");
    eprintln!("steps killed at, by rank: {reached:?}, {:?}", started.elapsed());
}
