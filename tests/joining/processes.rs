//! Joining with processes as ranks; some are killed.
// The killed rank deliberately leaves a child behind.
#![allow(clippy::zombie_processes)]

use crate::fault_points::{die, monotonic};
use crate::jobs::{Job, RANKS, open, say};
use crate::process::role;
use crate::stores::eventually;
use crate::threads::{LONG, SOON, spec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use symm::bootstrap::{JoinSpec, join};
use symm::error::ErrorKind;
use symm::exit_watch::watch;
use symm::store::Store;
use symm::sys::required;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Role {
    dir: PathBuf,
    rank: u32,
    hold_rank: bool,
    /// Number of file descriptors that the rank may open in addition to the descriptors it has.
    spare: Option<usize>,
    /// Action after joining: exit, kill itself, or wait until the watcher reports an exit.
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

/// Runs as a rank if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn rank_process() {
    let Some(role) = role::<Role>() else { return };
    let Role { dir, rank, hold_rank, spare, then } = role;
    let store = open(&dir);
    let before = required::descriptors().1;
    let limit = getrlimit(Resource::Nofile);
    if let Some(spare) = spare {
        // The limit applies to the number of a descriptor, not to the count, and this process may
        // have inherited numbers above the first free one.
        let first_free = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
        let current = Some(first_free + spare as u64);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    }
    let started = Instant::now();
    let outcome = join(&store, &JoinSpec { hold_rank, ..spec("g", rank, RANKS, LONG) });
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
            let tell = Arc::new(move |rank: symm::rank::Rank, how| {
                let _ = sender.send((rank.0, how, monotonic()));
            });
            let _watch = watch(&joined.members, tell).unwrap();
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
    say(&dir, &format!("report.{rank}"), &report);
    // Stay alive until all ranks have reported. Otherwise ranks that are still joining would report
    // this rank's exit as the failure, or a late rank could not learn the failure from this one.
    let limit = Instant::now() + Duration::from_millis(if spare.is_some() { 2500 } else { 300 });
    while !(0..RANKS).all(|rank| dir.join(format!("report.{rank}")).exists())
        && Instant::now() < limit
    {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The role of a rank of `job` that joins and exits.
fn plain(job: &Job, rank: u32) -> Role {
    let dir = job.dir.path().to_owned();
    Role { dir, rank, hold_rank: false, spare: None, then: Then::Exit }
}

fn start(job: &mut Job, role: &Role) {
    job.start("processes::rank_process", role.rank, role);
}

/// Returns the reports of the ranks that lived to write one, once all processes have ended.
fn finish(job: &mut Job) -> Vec<(u32, Report)> {
    let mut ranks = std::mem::take(&mut job.ranks);
    for (_, child) in &mut ranks {
        child.wait().unwrap();
    }
    let names = ranks.into_iter().map(|(rank, _)| (rank, format!("report.{rank}")));
    let written = names.filter(|(_, name)| job.dir.path().join(name).exists());
    written.map(|(rank, name)| (rank, job.take(&name))).collect()
}

/// Returns how long after the exit of one of four ranks the last of the others learned of it.
fn last_news_of_a_kill() -> Duration {
    let mut job = Job::new();
    for rank in 0..RANKS {
        let then = if rank == 2 { Then::Die } else { Then::Watch };
        let role = Role { then, ..plain(&job, rank) };
        start(&mut job, &role);
    }
    let reports = finish(&mut job);
    let died: u64 = job.take("died");
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
    assert!((0..5).any(|_| last_news_of_a_kill() < Duration::from_millis(100)));
}

// proves P12
#[test]
fn a_new_run_works_with_what_a_killed_one_has_left() {
    let mut job = Job::new();
    for rank in 0..3 {
        let role = plain(&job, rank);
        start(&mut job, &role);
    }
    eventually("three records", || job.keys() == 3);
    job.kill();
    assert!(finish(&mut job).is_empty());
    assert_eq!(job.keys(), 3);
    for rank in 0..RANKS {
        let role = plain(&job, rank);
        start(&mut job, &role);
    }
    let reports = finish(&mut job);
    assert_eq!(reports.len(), 4);
    assert!(reports.iter().all(|(_, report)| report.kind == 0), "{reports:?}");
    assert_eq!(job.keys(), 0);
}

// proves P15
#[test]
fn a_process_that_claims_a_rank_of_a_group_that_lives_is_refused() {
    let mut job = Job::new();
    let placed = Role { hold_rank: true, then: Then::Watch, ..plain(&job, 0) };
    let holder = |job: &Job, rank: u32| {
        let held = job.store.get(&format!("symm/g/0/{rank}/membership"), Some(LONG)).unwrap();
        serde_json::from_slice::<serde_json::Value>(&held).unwrap()["pid"] == job.pid(rank)
    };
    let formed = |job: &Job| (0..RANKS).all(|rank| holder(job, rank)) && job.keys() == 4;
    // The second time, new ranks replace those that were killed the first time.
    for _ in 0..2 {
        for rank in 0..RANKS {
            start(&mut job, &Role { rank, ..placed.clone() });
        }
        eventually("the group", || formed(&job));
        for rank in [0, 1] {
            let first = job.pid(rank);
            start(&mut job, &Role { rank, ..placed.clone() });
            let late = job.pid(rank);
            let refused: Report = job.take(&format!("report.{rank}"));
            let expected = format!(
                "rank {rank} of group \"g\" of 4 ranks is claimed twice: by pid {first} and by pid \
                 {late}"
            );
            assert_eq!((refused.kind, &refused.message), (ErrorKind::Config as u8, &expected));
            assert!(refused.seconds < SOON.as_secs_f64() && refused.leaked == 0, "{refused:?}");
            job.ranks.pop().unwrap().1.wait().unwrap();
            assert!(formed(&job), "the late one has left something");
        }
        job.kill();
        // Ranks that were killed last may first have reported that other ranks exited.
        finish(&mut job);
    }
}

// proves P15
#[test]
fn too_few_descriptors_are_named_by_all() {
    let cases = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (2, 0), (2, 1), (2, 2)];
    let jobs = cases.map(|(victim, spare)| {
        let mut job = Job::new();
        for rank in 0..RANKS {
            let role = Role { spare: (rank == victim).then_some(spare), ..plain(&job, rank) };
            start(&mut job, &role);
        }
        job
    });
    for (mut job, (victim, spare)) in jobs.into_iter().zip(cases) {
        let named = format!("rank {victim} (pid {})", job.pid(victim));
        // Without any descriptor, the victim cannot even determine the kernel version.
        let (begin, end) = match spare {
            0 => (format!("{named} cannot join group \"g\" of 4 ranks: /proc/"), "raise ulimit -n"),
            _ => ("RLIMIT_NOFILE ".into(), ""),
        };
        let part = match spare {
            0 => "Too many open files".into(),
            _ => format!(" of {named} is too low: "),
        };
        let reports = finish(&mut job);
        assert_eq!(reports.len(), 4);
        for (rank, report) in reports {
            let case = format!("rank {rank}, {spare} spare on rank {victim}: {report:?}");
            let message = &report.message;
            assert_eq!((report.kind, report.leaked), (ErrorKind::Config as u8, 0), "{case}");
            assert!(message.starts_with(&begin) && message.ends_with(end), "{case}");
            assert!(message.contains(&part), "{case}");
            assert!(report.seconds < 3.0, "{case}");
        }
    }
}
