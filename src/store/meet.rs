//! Agreement of ranks through a store: which ranks have arrived, and the word that each rank
//! publishes.
//!
//! A meeting does not detect processes that are dead, stopped or left over from an earlier run;
//! joining detects them (`src/bootstrap/collect_records.rs`).

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::{Rank, name_ranks};
use crate::sys::node_id::NodeId;
use crate::sys::process::{self, ProcessId};
use bytes::Bytes;
use std::time::{Duration, Instant};

/// How long after the deadline rank 0 keeps serving ranks that still need the list of missing
/// ranks, and how long they wait for it.
pub(crate) const LAST_WORDS: Duration = Duration::from_millis(500);

/// Maximum number of ranks that the error of `gather` names.
const NAMED: usize = 8;

/// One rank's part in a meeting of `size` ranks, under keys that start with `prefix`.
pub struct StoreMeeting<'a, S: ?Sized = dyn Store + 'a> {
    /// The store that all ranks use.
    pub store: &'a S,
    /// Prefix of the meeting's keys.
    pub prefix: String,
    /// This rank.
    pub me: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Deadline of every wait.
    pub deadline: Instant,
}

impl<S: Store + ?Sized> StoreMeeting<'_, S> {
    fn key(&self, what: &str, rank: Rank) -> String {
        format!("{}/{what}/{rank}", self.prefix)
    }

    fn keys(&self, what: &str) -> Vec<String> {
        (0..self.size).map(|rank| self.key(what, Rank(rank))).collect()
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.size).map(Rank)
    }

    /// Publishes `word` on the topic `what` to all ranks.
    pub fn announce(&self, what: &str, word: &[u8]) -> Result<()> {
        self.store.set(&self.key(what, self.me), word)
    }

    /// Returns the ranks that have published a word on `what`.
    pub fn came(&self, what: &str) -> Result<Vec<Rank>> {
        let told = |rank: &Rank| self.store.check(&[&self.key(what, *rank)]);
        self.ranks()
            .filter_map(|rank| told(&rank).map(|told| told.then_some(rank)).transpose())
            .collect()
    }

    /// Removes this rank's word on `what`.
    pub fn forget(&self, what: &str) -> Result<()> {
        forget(self.store, &self.key(what, self.me))
    }

    /// Adds one to the number of this rank's meetings under this prefix, and returns the sum. The
    /// number is needed because the same processes may meet again in the same store. Meetings that
    /// failed before this rank came are skipped.
    fn turn(&self) -> Result<i64> {
        loop {
            let turn = self.store.add(&self.key("turn", self.me), 1)?;
            let reported = self.reported(turn);
            let over = self.me.0 != 0 && self.store.check(&[&reported])?;
            if !over || self.store.get(&reported, Some(self.left()))?.is_empty() {
                return Ok(turn);
            }
        }
    }

    /// Returns the key of rank 0's word about meeting `turn`: empty if all ranks arrived,
    /// otherwise the error.
    fn reported(&self, turn: i64) -> String {
        format!("{}/reported/{turn}", self.prefix)
    }

    /// Waits until all of `ranks` have published a word on `what`.
    fn wait(&self, what: &str, ranks: &[Rank], limit: Duration) -> Result<()> {
        let keys: Vec<String> = ranks.iter().map(|&rank| self.key(what, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.wait(&keys, Some(limit))
    }

    /// Returns the time until the deadline, at least 1 ms because a store takes 0 for "no limit".
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// Returns the ranks that have not published a word on `what`.
    pub fn missing(&self, what: &str) -> Result<Vec<Rank>> {
        let came = self.came(what)?;
        Ok(self.ranks().filter(|rank| !came.contains(rank)).collect())
    }

    /// Publishes `word` on `what` and returns the words of all ranks, in rank order.
    ///
    /// # Errors
    /// `Timeout` names the missing ranks.
    pub fn gather(&self, what: &str, word: &[u8]) -> Result<Vec<Bytes>> {
        self.announce(what, word)?;
        let keys = self.keys(what);
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.wait(&keys, Some(self.left())).or_else(|error| {
            let missing = if error.kind == ErrorKind::Timeout {
                self.missing(what)?
            } else {
                return Err(error);
            };
            if missing.is_empty() {
                Ok(())
            } else {
                Err(Error::timeout(format!(
                    "waits for {}, which did not come in time",
                    named(&missing)
                )))
            }
        })?;
        self.store.multi_get(&keys, Some(self.left()))
    }

    /// Returns once all ranks have arrived at a store that rank 0 serves. At rank 0's deadline,
    /// every rank that has arrived learns which ranks are missing.
    ///
    /// # Errors
    /// `Timeout` names the missing ranks; `Network` if rank 0 has exited; `Config` if another live
    /// process has joined as this rank.
    pub fn assemble(&self) -> Result<()> {
        self.reject_taken()?;
        let turn = self.turn()?;
        let [here, received, gave_up] =
            ["here", "received", "gave up"].map(|what| format!("{what}/{turn}"));
        let reported = self.reported(turn);
        self.announce(&here, b"1")?;
        let complaint = || {
            let gone = self.came(&gave_up)?;
            let (gone, missing): (Vec<Rank>, Vec<Rank>) =
                self.missing(&here)?.into_iter().partition(|rank| gone.contains(rank));
            let came = self.size as usize - missing.len() - gone.len();
            let gave_up = format!("{} gave up before", named(&gone));
            let problem = if missing.is_empty() {
                format!("{gave_up} the others had arrived")
            } else {
                let more = if gone.is_empty() { String::new() } else { format!("; {gave_up}") };
                let missing = named(&missing);
                format!("{missing} did not arrive before the timeout, {came} did{more}")
            };
            Ok(format!("rendezvous of {} ranks: {problem}", self.size))
        };
        if self.me.0 != 0 {
            let heard = || -> Result<String> {
                let word = self.store.get(&reported, Some(self.left() + LAST_WORDS))?;
                if !word.is_empty() {
                    self.announce(&received, b"1")?;
                }
                Ok(String::from_utf8_lossy(&word).into_owned())
            };
            let word = heard().or_else(|error| {
                if error.kind != ErrorKind::Timeout {
                    return Err(error);
                }
                let complaint = complaint()?;
                // This rank no longer counts as arrived, and may try again in the same meeting.
                self.announce(&gave_up, b"1")?;
                self.forget(&here)?;
                if self.store.check(&[&reported])? {
                    return heard();
                }
                self.store.add(&self.key("turn", self.me), -1)?;
                Ok(complaint)
            });
            let ended = |error: Error, how: &str| {
                let text = format!("rank 0, which serves the rendezvous, {how}: {}", error.message);
                Err(Error { message: text, ..error })
            };
            return match word {
                Ok(word) if word.is_empty() => Ok(()),
                Ok(word) => Err(Error::timeout(word)),
                Err(error) if error.kind == ErrorKind::Network => ended(error, "has ended or gone"),
                Err(error) if error.kind == ErrorKind::Timeout => ended(error, "does not answer"),
                Err(error) => Err(error),
            };
        }
        let all: Vec<Rank> = self.ranks().collect();
        match self.wait(&here, &all, self.left()) {
            Err(error) if error.kind == ErrorKind::Timeout => {
                let word = complaint()?;
                let came = self.came(&here)?;
                self.store.set(&reported, word.as_bytes())?;
                // Rank 0 itself need not acknowledge.
                match self.wait(&received, &came[1..], LAST_WORDS) {
                    Err(error) if error.kind != ErrorKind::Timeout => Err(error),
                    Ok(()) | Err(_) => Err(Error::timeout(word)),
                }
            }
            Err(error) => {
                // Without this word, the others would wait in this meeting for ever.
                let word = format!("rank 0, which serves the rendezvous, gave up: {error}");
                _ = self.store.set(&reported, word.as_bytes());
                Err(error)
            }
            Ok(()) => {
                self.store.set(&reported, b"")?;
                self.keys(&here).iter().try_for_each(|key| forget(self.store, key))
            }
        }
    }

    /// Fails if another live process has joined as this rank. Processes that have met here may meet
    /// again with their ranks exchanged.
    fn reject_taken(&self) -> Result<()> {
        // Without /proc, processes cannot be compared.
        let (Ok(own), Ok(host)) = (process::own(), NodeId::own()) else { return Ok(()) };
        let place = format!("{} {}", host.boot, host.pid);
        let mine = format!("{place} {} {}", own.pid, own.start_time);
        let key = self.key("process", self.me);
        let found = self.store.compare_set(&key, b"", mine.as_bytes())?;
        if found == mine {
            return Ok(());
        }
        let other = std::str::from_utf8(&found)
            .ok()
            .and_then(|found| found.strip_prefix(&place))
            .and_then(|found| {
                let (pid, start_time) = found.trim_start().split_once(' ')?;
                Some(ProcessId { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? })
            });
        if let Some(other) = other.filter(|&other| !process::is_ending(other)) {
            let known: Vec<String> =
                self.came("process")?.into_iter().map(|rank| self.key("process", rank)).collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            if !self.store.multi_get(&known, Some(self.left()))?.iter().any(|known| *known == mine)
            {
                let (rank, size) = (self.me, self.size);
                return Err(Error::config(format!(
                    "rank {rank} of {size} is claimed twice: by pid {} and by pid {}",
                    other.pid, own.pid
                )));
            }
        }
        self.store.set(&key, mine.as_bytes())
    }

    /// Returns once all ranks have called this under the same prefix; see [`Store::barrier`].
    pub(super) fn pass(&self) -> Result<()> {
        let started = Instant::now();
        let place = |rank: Rank| format!("{}/{rank}", self.prefix);
        let round = self.store.add(&place(self.me), 1)?;
        let [count, open] = self.door(round);
        if self.store.add(&count, 1)? == i64::from(self.size) {
            self.door(round - 1).iter().try_for_each(|stale| forget(self.store, stale))?;
            return self.store.set(&open, b"");
        }
        self.store.wait(&[&open], Some(self.left())).or_else(|error| {
            if error.kind != ErrorKind::Timeout {
                return Err(error);
            }
            let came = |rank| {
                Ok(self.store.check(&[&place(rank)])? && self.store.add(&place(rank), 0)? >= round)
            };
            let late = self
                .ranks()
                .filter_map(|rank| came(rank).map(|came| (!came).then_some(rank)).transpose());
            let late = name_ranks(&late.collect::<Result<Vec<_>>>()?);
            let (key, rank, size, waited) =
                (&self.prefix, self.me, self.size, started.elapsed().as_secs_f64());
            Err(Error::timeout(format!(
                "barrier {key:?}: rank {rank} waited {waited:.1} s for \
                {late} of {size} ranks (timeout)"
            )))
        })
    }

    /// Returns the keys of `round`: the number of ranks that have arrived, and a flag that is set
    /// once all have.
    fn door(&self, round: i64) -> [String; 2] {
        ["count", "open"].map(|what| format!("{}/round {round}/{what}", self.prefix))
    }
}

/// Removes `key`, unless the store cannot delete keys.
fn forget<S: Store + ?Sized>(store: &S, key: &str) -> Result<()> {
    match store.delete(key) {
        Err(error) if error.kind == ErrorKind::NotImplemented => Ok(()),
        outcome => outcome.map(|_| ()),
    }
}

/// Lists the first [`NAMED`] ranks, in the form in which store errors list keys.
fn named(ranks: &[Rank]) -> String {
    let numbers: Vec<String> = ranks.iter().take(NAMED).map(Rank::to_string).collect();
    let more = if ranks.len() > NAMED {
        format!(" and {} more", ranks.len() - NAMED)
    } else {
        String::new()
    };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::memory::MemoryStore;

    const SHORT: Duration = Duration::from_millis(50);

    fn meeting(
        store: &MemoryStore,
        me: u32,
        size: u32,
        limit: Duration,
    ) -> StoreMeeting<'_, MemoryStore> {
        StoreMeeting {
            store,
            prefix: "m".into(),
            me: Rank(me),
            size,
            deadline: Instant::now() + limit,
        }
    }

    /// Runs `body` on each of `ranks` concurrently and returns the results.
    fn on_ranks<T: Send>(
        ranks: &[u32],
        size: u32,
        limit: Duration,
        body: impl Fn(StoreMeeting<'_, MemoryStore>) -> T + Sync,
    ) -> Vec<T> {
        let store = MemoryStore::new();
        std::thread::scope(|scope| {
            let one = |&rank: &u32| {
                let (body, store) = (&body, &store);
                scope.spawn(move || body(meeting(store, rank, size, limit)))
            };
            let threads: Vec<_> = ranks.iter().map(one).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn every_rank_gets_all_words_in_the_order_of_ranks() {
        for words in on_ranks(&[2, 0, 1], 3, Duration::from_secs(30), |here| {
            here.gather("word", here.me.to_string().as_bytes())
        }) {
            assert_eq!(words, Ok(["0", "1", "2"].map(Bytes::from).to_vec()));
        }
    }

    #[test]
    fn a_gathering_names_the_first_missing_ranks_at_its_deadline() {
        for (size, named) in
            [(2, "rank 1"), (3, "ranks 1, 2"), (11, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more")]
        {
            let error = on_ranks(&[0], size, SHORT, |here| here.gather("word", b""))
                .remove(0)
                .expect_err("missing");
            assert_eq!(
                (error.kind, error.message),
                (ErrorKind::Timeout, format!("waits for {named}, which did not come in time"))
            );
        }
    }

    #[test]
    fn ranks_that_told_have_come_until_they_forget() {
        let store = MemoryStore::new();
        let [zero, two] = [0, 2].map(|me| meeting(&store, me, 3, SHORT));
        two.announce("this", b"").expect("set");
        zero.announce("that", b"").expect("set");
        assert_eq!((zero.came("this"), zero.came("that")), (Ok(vec![Rank(2)]), Ok(vec![Rank(0)])));
        two.forget("this").expect("deleted");
        assert_eq!(zero.came("this"), Ok(vec![]));
    }

    #[test]
    fn ranks_of_threads_assemble_again_and_again() {
        let outcomes = on_ranks(&[0, 1, 2], 3, Duration::from_secs(30), |here| {
            here.assemble().and_then(|()| here.assemble())
        });
        assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn all_ranks_that_came_hear_from_rank_0_which_did_not() {
        let store = MemoryStore::new();
        let errors = std::thread::scope(|scope| {
            let patient = scope.spawn(|| meeting(&store, 2, 4, Duration::from_secs(30)).assemble());
            store.wait(&["m/here/1/2"], None).expect("told");
            [meeting(&store, 0, 4, SHORT).assemble(), patient.join().expect("no panic")]
        });
        for error in errors.map(|outcome| outcome.expect_err("missing")) {
            let text = "rendezvous of 4 ranks: ranks 1, 3 did not arrive before the timeout, 2 did";
            assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Timeout, text));
        }
        let error =
            on_ranks(&[1], 2, SHORT, |here| here.assemble()).remove(0).expect_err("no rank 0");
        assert_eq!(
            error.message,
            "rendezvous of 2 ranks: rank 0 did not arrive before the timeout, 1 did"
        );
    }

    #[test]
    fn a_rank_that_gave_up_alone_may_come_again() {
        let store = MemoryStore::new();
        meeting(&store, 1, 3, SHORT).assemble().expect_err("no rank 0");
        assert_eq!(together(&store), [Ok(()), Ok(()), Ok(())]);
        meeting(&store, 1, 3, SHORT).assemble().expect_err("no rank 0");
        let error = meeting(&store, 0, 3, SHORT).assemble().expect_err("alone");
        assert_eq!(
            error.message,
            "rendezvous of 3 ranks: rank 2 did not arrive before the timeout, 1 did; \
             rank 1 gave up before"
        );
        assert_eq!(together(&store), [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn a_rank_that_comes_after_a_failed_meeting_takes_part_in_the_next_one() {
        let store = MemoryStore::new();
        meeting(&store, 0, 3, SHORT).assemble().expect_err("alone");
        assert_eq!(together(&store), [Ok(()), Ok(()), Ok(())]);
    }

    /// Assembles three ranks.
    fn together(store: &MemoryStore) -> [Result<()>; 3] {
        std::thread::scope(|scope| {
            let one = |rank| {
                scope.spawn(move || meeting(store, rank, 3, Duration::from_secs(30)).assemble())
            };
            [0, 1, 2].map(one).map(|thread| thread.join().expect("no panic"))
        })
    }

    #[test]
    fn a_living_process_is_not_replaced_and_an_ended_one_is() {
        let (store, host) = (MemoryStore::new(), NodeId::own().expect("/proc"));
        let claim = |pid: u32, start_time: u64| {
            let text = format!("{} {} {pid} {start_time}", host.boot, host.pid);
            store.set("m/process/0", text.as_bytes()).expect("set");
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let start_time = process::tests::identity(child.id()).start_time;
        claim(child.id(), start_time);
        let error = meeting(&store, 0, 1, SHORT).assemble().expect_err("claimed");
        let text = format!(
            "rank 0 of 1 is claimed twice: by pid {} and by pid {}",
            child.id(),
            std::process::id()
        );
        assert_eq!((error.kind, error.message), (ErrorKind::Config, text));
        // Processes that have met here may join again as other ranks.
        let own = process::own().expect("/proc");
        store
            .set(
                "m/process/1",
                format!("{} {} {} {}", host.boot, host.pid, own.pid, own.start_time).as_bytes(),
            )
            .expect("set");
        assert_eq!(meeting(&store, 0, 2, SHORT).reject_taken(), Ok(()));
        store.delete("m/process/1").expect("deleted");
        claim(child.id(), start_time);
        child.kill().and_then(|()| child.wait()).expect("killed");
        assert_eq!(meeting(&store, 0, 1, SHORT).assemble(), Ok(()));
    }
}
