//! Joining with processes as ranks; some are killed while they join.
//!
//! Each rank is a process of the test program.
// The killed rank deliberately leaves a child behind.
#![allow(clippy::zombie_processes)]

use crate::fault_points::{die, monotonic};
use crate::process::{process, role};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde::{Deserialize, Serialize};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use symm::bootstrap::{JoinSpec, join};
use symm::dtype::SumOrder;
use symm::error::{ErrorKind, Result};
use symm::exit_watch::watch;
use symm::rank::Rank;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::request::{Request, StoreOp};
use symm::store::table::TableReply;
use symm::sys::required;

/// The file of a job through which its ranks meet.
const STORE: &str = "store";

/// Seconds within which even a busy node rejects a second claim; the timeout is 20.
const AT_ONCE: f64 = 5.0;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Role {
    dir: PathBuf,
    rank: u32,
    size: u32,
    timeout_ms: u64,
    /// Time for which this rank sleeps before it connects.
    sleep_ms: u64,
    keep_membership: bool,
    /// Number of file descriptors that it may open in addition to those it has.
    spare: Option<usize>,
    /// Action after joining: kill itself, or wait until the watcher reports it.
    then: Then,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Then {
    Exit,
    Die,
    Watch,
}

#[derive(Debug, Serialize, Deserialize)]
struct Report {
    kind: u8,
    message: String,
    seconds: f64,
    /// Number of file descriptors left after a failure.
    leaked: usize,
    /// The watcher's report, and its time in nanoseconds on the monotonic clock.
    news: Option<(u32, String, u64)>,
}

/// A file store of a rank that may be slow.
struct Slow {
    store: FileStore,
    role: Role,
}

impl Slow {
    fn open(role: Role) -> Self {
        Self { store: FileStore::open(&role.dir.join(STORE), role.size).unwrap(), role }
    }
}

impl Store for Slow {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let reply = self.store.call(request, limit)?;
        if request.op == StoreOp::MultiGet {
            std::thread::sleep(Duration::from_millis(self.role.sleep_ms));
        }
        Ok(reply)
    }
}

/// Runs as a rank if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn rank_process() {
    let Some(role) = role::<Role>() else { return };
    let (rank, dir, then) = (role.rank, role.dir.clone(), role.then);
    let store = Slow::open(role.clone());
    let before = required::descriptors().1;
    let limit = getrlimit(Resource::Nofile);
    if let Some(spare) = role.spare {
        // The limit applies to the number of a descriptor, not to the count, and this process may
        // have inherited numbers above the first free one.
        let first_free = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
        let current = Some(first_free + spare as u64);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    }
    let spec = JoinSpec {
        group: "g",
        rank: Rank(rank),
        size: role.size,
        attempt: "0",
        timeout: Duration::from_millis(role.timeout_ms),
        segment_bytes: 1 << 20,
        reserved_bytes: 4096,
        hold_rank: role.keep_membership,
        global_ranks: &[],
        order: SumOrder::Rank,
        known: None,
    };
    let started = Instant::now();
    let outcome = join(&store, &spec);
    let seconds = started.elapsed().as_secs_f64();
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut report = Report { kind: 0, message: String::new(), seconds, leaked: 0, news: None };
    match outcome {
        Err(error) => {
            report.kind = error.kind as u8;
            report.message = error.message;
            report.leaked = required::descriptors().1 - before;
        }
        Ok(joined) => {
            let (sender, news) = channel();
            let _watch = watch(
                &joined.members,
                Arc::new(move |rank, how| {
                    let _ = sender.send((rank.0, how, monotonic()));
                }),
            )
            .unwrap();
            match then {
                Then::Exit => {}
                Then::Die => {
                    std::thread::sleep(Duration::from_millis(300));
                    // A child that lives on with all file descriptors must not hide the exit.
                    Command::new("sleep").arg("2").stdout(Stdio::null()).spawn().unwrap();
                    die(&std::fs::File::create(dir.join("died")).unwrap());
                }
                Then::Watch => report.news = news.recv_timeout(Duration::from_secs(30)).ok(),
            }
        }
    }
    // A rank that is killed while it writes leaves no report instead of a partial one.
    let unfinished = dir.join(format!("unfinished.{rank}.{}", std::process::id()));
    std::fs::write(&unfinished, serde_json::to_vec(&report).unwrap()).unwrap();
    std::fs::rename(unfinished, dir.join(format!("report.{rank}"))).unwrap();
    // Stay alive until all ranks have reported. Otherwise ranks that are still joining would take
    // this rank's exit for the failure, or a late rank could not learn the failure from this one.
    let limit =
        Instant::now() + Duration::from_millis(if role.spare.is_some() { 2500 } else { 300 });
    while !(0..role.size).all(|rank| dir.join(format!("report.{rank}")).exists())
        && Instant::now() < limit
    {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A temporary directory, removed at the end; and the processes, killed at the end.
struct Job {
    dir: PathBuf,
    /// Inspects the keys; as a user of the file, it also keeps the keys of killed ranks.
    store: FileStore,
    ranks: Vec<(u32, Child)>,
}

impl Job {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("symm-join-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let store = FileStore::open(&dir.join(STORE), 4).unwrap();
        Self { dir, store, ranks: Vec::new() }
    }

    fn role(&self, rank: u32) -> Role {
        let dir = self.dir.clone();
        Role {
            dir,
            rank,
            size: 4,
            timeout_ms: 2000,
            sleep_ms: 0,
            keep_membership: false,
            spare: None,
            then: Then::Exit,
        }
    }

    fn start(&mut self, role: &Role) {
        let child = process("processes::rank_process", role).stdout(Stdio::null()).spawn().unwrap();
        self.ranks.push((role.rank, child));
    }

    fn pid(&self, rank: u32) -> u32 {
        self.ranks.iter().rev().find(|(other, _)| *other == rank).unwrap().1.id()
    }

    /// Returns the reports of the ranks that lived to write one.
    fn finish(&mut self) -> Vec<(u32, Report)> {
        for (_, child) in &mut self.ranks {
            child.wait().unwrap();
        }
        let reports = self.ranks.drain(..).filter_map(|(rank, _)| {
            let path = self.dir.join(format!("report.{rank}"));
            let bytes = std::fs::read(&path).ok()?;
            std::fs::remove_file(path).unwrap();
            Some((rank, serde_json::from_slice(&bytes).unwrap()))
        });
        reports.collect()
    }

    fn keys(&self) -> i64 {
        self.store.num_keys().unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (_, child) in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Returns how long after the exit of one of four ranks the last of the others learned of it.
fn last_news_of_a_kill(turn: u32) -> Duration {
    let mut job = Job::new(&format!("watch-{turn}"));
    for rank in 0..4 {
        let then = if rank == 2 { Then::Die } else { Then::Watch };
        job.start(&Role { then, timeout_ms: 20_000, ..job.role(rank) });
    }
    let reports = job.finish();
    let died: u64 = std::fs::read_to_string(job.dir.join("died")).unwrap().parse().unwrap();
    assert_eq!((reports.len(), job.keys()), (3, 0));
    let late = reports.into_iter().map(|(_, report)| {
        assert_eq!(report.message, "");
        let (who, how, when) = report.news.unwrap();
        assert_eq!((who, how.as_str()), (2, "killed by signal 9 (SIGKILL)"));
        Duration::from_nanos(when - died)
    });
    late.max().unwrap()
}

// proves P2
#[test]
fn processes_join_and_hear_of_a_kill_within_100_ms() {
    // On a busy node a watcher may have to wait for a core; one attempt in five must be in time.
    assert!((0..5).any(|turn| last_news_of_a_kill(turn) < Duration::from_millis(100)));
}

#[test]
fn a_rank_killed_while_it_waits_for_the_memory_is_named_at_once() {
    for victim in [0, 2] {
        let mut job = Job::new(&format!("kill-waiting-{victim}"));
        for rank in 0..4 {
            // Rank 3 sleeps between its record and its connection, which delays the others.
            let sleep_ms = if rank == 3 { 1500 } else { 0 };
            job.start(&Role { sleep_ms, timeout_ms: 10_000, ..job.role(rank) });
        }
        while job.keys() < 4 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Long enough for all but rank 3 to connect.
        std::thread::sleep(Duration::from_millis(300));
        let pid = job.pid(victim);
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        let reports = job.finish();
        assert_eq!(reports.len(), 3);
        for (rank, report) in reports {
            let expected = format!(
                "rank {victim} (pid {pid}) ended while joining group \"g\" of 4 ranks: killed by \
                 signal 9 (SIGKILL)"
            );
            let sleeper = rank == 3;
            assert!(report.seconds < if sleeper { 5.0 } else { 1.5 }, "{report:?}");
            assert!(report.message == expected || sleeper, "{report:?}");
            assert!(report.message.contains(&format!("rank {victim} (pid {pid})")), "{report:?}");
            assert_eq!(report.leaked, 0);
        }
    }
}

// proves P12
#[test]
fn a_new_run_works_with_what_a_killed_one_has_left() {
    let mut job = Job::new("left");
    for rank in 0..3 {
        job.start(&Role { timeout_ms: 20_000, ..job.role(rank) });
    }
    while job.keys() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    for (_, child) in &mut job.ranks {
        child.kill().unwrap();
    }
    assert!(job.finish().is_empty());
    assert_eq!(job.keys(), 3);
    for rank in 0..4 {
        job.start(&Role { timeout_ms: 20_000, ..job.role(rank) });
    }
    let reports = job.finish();
    assert_eq!(reports.len(), 4);
    assert!(reports.iter().all(|(_, report)| report.kind == 0), "{reports:?}");
    assert_eq!(job.keys(), 0);
}

#[test]
fn a_process_that_claims_a_taken_rank_is_refused() {
    let mut job = Job::new("twice");
    for rank in [0, 1, 2] {
        job.start(&Role { timeout_ms: 20_000, ..job.role(rank) });
    }
    while job.keys() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let first = job.pid(2);
    let mut second = Job::new("twice-second");
    second.start(&Role { dir: job.dir.clone(), ..job.role(2) });
    let pid = second.pid(2);
    second.dir.clone_from(&job.dir);
    let refused = second.finish();
    let expected = format!(
        "rank 2 of group \"g\" of 4 ranks is claimed twice: by pid {first} and by pid {pid}"
    );
    assert_eq!((refused[0].1.kind, &refused[0].1.message), (ErrorKind::Config as u8, &expected));
    assert!(refused[0].1.seconds < AT_ONCE);
    job.start(&Role { timeout_ms: 20_000, ..job.role(3) });
    let reports = job.finish();
    assert!(reports.iter().all(|(_, report)| report.kind == 0), "{reports:?}");
}

// proves P15
#[test]
fn a_process_that_claims_a_rank_of_a_group_that_lives_is_refused() {
    let mut job = Job::new("late");
    let placed =
        Role { keep_membership: true, timeout_ms: 20_000, then: Then::Watch, ..job.role(0) };
    let holder = |job: &Job, rank: u32| {
        let held = job
            .store
            .get(&format!("symm/g/0/{rank}/membership"), Some(Duration::from_secs(20)))
            .unwrap();
        serde_json::from_slice::<serde_json::Value>(&held).unwrap()["pid"] == job.pid(rank)
    };
    let formed = |job: &Job| (0..4).all(|rank| holder(job, rank)) && job.keys() == 4;
    // The second time, new ranks replace those that were killed the first time.
    for _ in 0..2 {
        for rank in 0..4 {
            job.start(&Role { rank, ..placed.clone() });
        }
        while !formed(&job) {
            std::thread::sleep(Duration::from_millis(5));
        }
        for rank in [0, 1] {
            let mut late = Job::new("late-fifth");
            let own = std::mem::replace(&mut late.dir, job.dir.clone());
            late.start(&Role { rank, ..placed.clone() });
            let expected = format!(
                "rank {rank} of group \"g\" of 4 ranks is claimed twice: by pid {} and by pid {}",
                job.pid(rank),
                late.pid(rank)
            );
            let refused = late.finish();
            assert_eq!(
                (refused[0].1.kind, &refused[0].1.message),
                (ErrorKind::Config as u8, &expected)
            );
            assert!(refused[0].1.seconds < AT_ONCE && refused[0].1.leaked == 0, "{refused:?}");
            assert!(formed(&job), "the late one has left something");
            late.dir = own;
        }
        for (_, child) in &mut job.ranks {
            child.kill().unwrap();
        }
        job.finish();
    }
}

// proves P15
#[test]
fn too_few_descriptors_are_named_by_all() {
    let cases = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (2, 0), (2, 1), (2, 2)];
    let jobs = cases.map(|(victim, spare)| {
        let mut job = Job::new(&format!("nofile-{victim}-{spare}"));
        for rank in 0..4 {
            let spare = (rank == victim).then_some(spare);
            job.start(&Role { spare, timeout_ms: 10_000, ..job.role(rank) });
        }
        job
    });
    for (mut job, (victim, spare)) in jobs.into_iter().zip(cases) {
        let pid = job.pid(victim);
        let reports = job.finish();
        assert_eq!(reports.len(), 4);
        for (rank, report) in reports {
            let case = format!("rank {rank}, {spare} spare on rank {victim}: {report:?}");
            if spare == 0 {
                // The victim cannot even determine the kernel version.
                let expected =
                    format!("rank {victim} (pid {pid}) cannot join group \"g\" of 4 ranks: /proc/");
                assert!(
                    report.kind == ErrorKind::Config as u8 && report.message.starts_with(&expected),
                    "{case}"
                );
                assert!(
                    report.message.contains("Too many open files")
                        && report.message.ends_with("raise ulimit -n"),
                    "{case}"
                );
            } else {
                assert_eq!(report.kind, ErrorKind::Config as u8, "{case}");
                assert!(report.message.starts_with("RLIMIT_NOFILE "), "{case}");
                assert!(
                    report.message.contains(&format!(" of rank {victim} (pid {pid}) is too low: ")),
                    "{case}"
                );
            }
            assert!(report.seconds < 3.0, "{case}");
            assert_eq!(report.leaked, 0, "{case}");
        }
    }
}
