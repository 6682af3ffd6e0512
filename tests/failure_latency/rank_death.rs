//! Ranks as processes; one is killed or stopped during collectives.
//!
//! Each rank is a process of the test program; ranks meet through a file store.

use crate::alone;
use crate::process::{process, role};
use crate::threads::{call, run, span};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};
use symm::bootstrap::JoinOptions;
use symm::coll::call::Collective;
use symm::cta::CtaOptions;
use symm::dtype::{DType, SumOrder};
use symm::error::{ErrorKind, Result};
use symm::group::Group;
use symm::store::file::FileStore;

#[derive(Serialize, Deserialize)]
struct Role {
    folder: PathBuf,
    rank: i32,
    /// Number of elements in each call.
    count: usize,
    timeout: f64,
}

fn all_reduce(group: &Group, data: &mut [f32]) -> Result<()> {
    let tensor = vec![span(data)];
    run(group, call(Collective::AllReduce, DType::F32, tensor.clone(), tensor), None)
}

/// The program of a child: join, then all-reduce until something fails; each step is announced on
/// stdout.
#[test]
#[ignore = "the other tests start it"]
fn rank() {
    let Some(Role { folder, rank, count, timeout }) = role() else { return };
    let options = JoinOptions {
        group: "g".into(),
        rank,
        size: 3,
        global_ranks: Vec::new(),
        order: SumOrder::Rank,
        ctas: CtaOptions::default(),
        is_default: false,
        timeout: Some(Duration::from_secs_f64(timeout)),
    };
    let say = |text: String| {
        // Straight to the file descriptor, because the test harness captures printed text.
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").unwrap();
        out.flush().unwrap();
    };
    let store = FileStore::open(&folder.join("store"), 3).unwrap();
    let group = match Group::join(&store, &options, None) {
        Ok(group) => group,
        Err(error) => return say(format!("error {} {error}", error.kind as u8)),
    };
    let mut data = vec![1.0f32; count];
    for call in 0.. {
        if let Err(error) = all_reduce(&group, &mut data) {
            say(format!("error {} {error}", error.kind as u8));
            let again = all_reduce(&group, &mut data).expect_err("the group is dead");
            assert_eq!(again.message, error.message, "the first cause stands");
            return;
        }
        data.fill(1.0);
        if call == 3 {
            say("looping".into());
        }
    }
}

struct Ranks {
    _alone: MutexGuard<'static, ()>,
    children: Vec<Child>,
    lines: Vec<std::sync::mpsc::Receiver<String>>,
    folder: PathBuf,
}

/// Starts three ranks and returns once all are in their calls.
fn start(name: &str, count: usize, timeout: f64) -> Ranks {
    let _alone = alone();
    let folder = std::env::temp_dir().join(format!("symm-killed-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut children = Vec::new();
    let mut lines = Vec::new();
    for rank in 0..3 {
        let role = Role { folder: folder.clone(), rank, count, timeout };
        let mut child = process("rank_death::rank", &role).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            out.lines().map_while(std::result::Result::ok).try_for_each(|line| sender.send(line))
        });
        children.push(child);
        lines.push(receiver);
    }
    let ranks = Ranks { _alone, children, lines, folder };
    (0..3).for_each(|rank| drop(ranks.expect(rank, "looping", Duration::from_secs(20))));
    ranks
}

impl Ranks {
    /// Returns the first line of a rank that starts with `word`, within `limit`.
    fn expect(&self, index: usize, word: &str, limit: Duration) -> String {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines[index]
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("rank {index} did not say {word:?} within {limit:?}"));
            if line.starts_with(word) {
                return line;
            }
        }
    }

    /// Fails unless a rank reports an error of `kind` with all `words` within `limit`.
    fn fails(&self, index: usize, limit: Duration, kind: ErrorKind, words: &[&str]) {
        let line = self.expect(index, "error", limit);
        assert!(line.starts_with(&format!("error {} ", kind as u8)), "{line}");
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
    }

    fn signal(&self, index: usize, signal: i32) {
        // SAFETY: a child of this process that has not been reaped.
        assert_eq!(unsafe { libc::kill(self.children[index].id() as i32, signal) }, 0);
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

// proves P2
#[test]
fn killed_between_and_inside_collectives_of_every_size() {
    for (index, count) in [2, 3_000, 40_000, 16 << 20].into_iter().enumerate() {
        let victim = index % 3;
        let mut ranks = start(&format!("size{index}"), count, 30.0);
        let pid = ranks.children[victim].id();
        ranks.signal(victim, libc::SIGKILL);
        ranks.children[victim].wait().unwrap();
        for survivor in (0..3).filter(|&rank| rank != victim) {
            let dead = format!("rank {victim} (pid {pid})");
            ranks.fails(survivor, Duration::from_secs(1), ErrorKind::Peer, &[&dead, "all_reduce"]);
        }
    }
}

// proves P5
#[test]
fn stopped_and_continued_loses_nothing() {
    let ranks = start("stopped", 1000, 30.0);
    ranks.signal(1, libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(700));
    ranks.signal(1, libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(300));
    assert!((0..3).all(|rank| ranks.lines[rank].try_recv().is_err()), "nobody fails");
}

// proves P5
#[test]
fn stopped_past_the_timeout_is_named_as_stopped() {
    let ranks = start("late", 1000, 1.5);
    ranks.signal(1, libc::SIGSTOP);
    for survivor in [0, 2] {
        let words = ["rank 1", "stopped", "all_reduce(1000"];
        ranks.fails(survivor, Duration::from_millis(2500), ErrorKind::Timeout, &words);
    }
}
