//! Joining with processes as ranks, with too few file descriptors for some.

use crate::jobs::{Job, RANKS, open, say};
use crate::process::role;
use crate::threads::{LONG, spec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use symm::bootstrap::join;
use symm::error::ErrorKind;
use symm::sys::required;

#[derive(Serialize, Deserialize)]
struct Role {
    dir: PathBuf,
    rank: u32,
    /// Number of file descriptors that the rank may open in addition to the descriptors it has.
    spare: Option<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Report {
    kind: u8,
    message: String,
    seconds: f64,
    /// Number of file descriptors left after a failure.
    leaked: usize,
}

/// Runs as a rank if the test program was started as one; otherwise does nothing.
#[test]
#[ignore = "the other tests start it"]
fn rank_process() {
    let Some(role) = role::<Role>() else { return };
    let Role { dir, rank, spare } = role;
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
    let outcome = join(&store, &spec("g", rank, RANKS, LONG));
    let seconds = started.elapsed().as_secs_f64();
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut report = Report { kind: 0, message: String::new(), seconds, leaked: 0 };
    if let Err(error) = outcome {
        report.kind = error.kind as u8;
        report.message = error.message;
        report.leaked = required::descriptors().1 - before;
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

// proves P15
#[test]
fn too_few_descriptors_are_named_by_all() {
    let cases = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (2, 0), (2, 1), (2, 2)];
    let jobs = cases.map(|(victim, spare)| {
        let mut job = Job::new();
        for rank in 0..RANKS {
            let (dir, spare) = (job.dir.path().to_owned(), (rank == victim).then_some(spare));
            job.start("processes::rank_process", rank, &Role { dir, rank, spare });
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
        for (_, child) in &mut job.ranks {
            child.wait().unwrap();
        }
        for rank in 0..RANKS {
            let report: Report = job.take(&format!("report.{rank}"));
            let case = format!("rank {rank}, {spare} spare on rank {victim}: {report:?}");
            let message = &report.message;
            assert_eq!((report.kind, report.leaked), (ErrorKind::Config as u8, 0), "{case}");
            assert!(message.starts_with(&begin) && message.ends_with(end), "{case}");
            assert!(message.contains(&part), "{case}");
            assert!(report.seconds < 3.0, "{case}");
        }
    }
}
