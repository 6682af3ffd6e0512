//! Load generator: measures how long the calls of many concurrent clients of a store take, one
//! thread per client.

use super::Store;
use crate::error::{Error, Result};
use std::sync::Barrier;
use std::time::Instant;

/// The work that each client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Sets a key of its own.
    Set,
    /// Gets a key that exists.
    Get,
    /// Adds to a counter that all clients share.
    Add,
    /// Waits for a key that exists.
    Wait,
    /// Set, get, add and wait in turn; the time of all four counts as one call.
    Mix,
    /// Sets a key for which the next client waits, then waits for that client's key; half of the
    /// round trip counts.
    HandOver,
    /// A rendezvous: sets a key of its own, waits until all clients have set theirs, and gets the
    /// key of the next client.
    Meet,
}

impl Workload {
    /// Returns the work with this name in the benchmark.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "set" => Ok(Self::Set),
            "get" => Ok(Self::Get),
            "add" => Ok(Self::Add),
            "wait" => Ok(Self::Wait),
            "mix" => Ok(Self::Mix),
            "hand over" => Ok(Self::HandOver),
            "meet" => Ok(Self::Meet),
            other => Err(Error::value(format!("work {other:?} is unknown"))),
        }
    }
}

/// The result of [`drive`].
#[derive(Debug)]
pub struct LoadTimes {
    /// Seconds from the start of the first call to the end of the last.
    pub seconds: f64,
    /// Nanoseconds of each call.
    pub nanoseconds: Vec<u64>,
}

/// Runs `work` `calls` times on each of `clients`, which share one store. `HandOver` needs an even
/// number of clients.
pub fn drive(clients: &[&dyn Store], work: Workload, calls: u32) -> Result<LoadTimes> {
    if work == Workload::HandOver && !clients.len().is_multiple_of(2) {
        return Err(Error::value(format!("{} clients cannot hand over in pairs", clients.len())));
    }
    if let Some(first) = clients.first() {
        first.set("there", b"value")?;
    }
    let start = Barrier::new(clients.len());
    let outcomes: Vec<Result<(Vec<u64>, Instant, Instant)>> = std::thread::scope(|scope| {
        let start = &start;
        let one = |index| {
            scope.spawn(move || {
                start.wait();
                let began = Instant::now();
                Ok((repeat(clients, index, work, calls)?, began, Instant::now()))
            })
        };
        let threads: Vec<_> = (0..clients.len()).map(one).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::internal("a client of the load panicked")))
            })
            .collect()
    });
    let mut nanoseconds = Vec::new();
    let mut span: Option<(Instant, Instant)> = None;
    for outcome in outcomes {
        let (times, began, ended) = outcome?;
        nanoseconds.extend(times);
        span =
            Some(span.map_or((began, ended), |(first, last)| (first.min(began), last.max(ended))));
    }
    Ok(LoadTimes {
        seconds: span.map_or(0.0, |(first, last)| (last - first).as_secs_f64()),
        nanoseconds,
    })
}

fn repeat(clients: &[&dyn Store], client: usize, work: Workload, calls: u32) -> Result<Vec<u64>> {
    let store = clients[client];
    let own = format!("own {client}");
    let mut times = Vec::with_capacity(calls as usize);
    for call in 0..calls {
        let began = Instant::now();
        let mut share = 1;
        match work {
            Workload::Set => store.set(&own, b"value")?,
            Workload::Get => drop(store.get("there", None)?),
            Workload::Add => drop(store.add("sum", 1)?),
            Workload::Wait => store.wait(&["there"], None)?,
            Workload::Mix => {
                store.set(&own, b"value")?;
                store.get(&own, None)?;
                store.add("sum", 1)?;
                store.wait(&["there", &own], None)?;
            }
            Workload::HandOver => {
                share = 2;
                let [ball, back] =
                    [format!("{}: {call}", client & !1), format!("{}: {call} back", client & !1)];
                if client.is_multiple_of(2) {
                    store.set(&ball, b"value")?;
                    store.wait(&[&back], None)?;
                } else {
                    store.wait(&[&ball], None)?;
                    store.set(&back, b"value")?;
                }
            }
            Workload::Meet => {
                // Keys are not removed: a later load of the same store continues with the next
                // round.
                let round = store.add(&format!("rounds of {client}"), 1)?;
                store.set(
                    &format!("round {round}: {client}"),
                    b"an address of some fifty bytes, as backends have them",
                )?;
                if store.add(&format!("round {round}"), 1)? == clients.len() as i64 {
                    store.set(&format!("round {round}: all"), b"")?;
                }
                store.wait(&[&format!("round {round}: all")], None)?;
                store.get(&format!("round {round}: {}", (client + 1) % clients.len()), None)?;
            }
        }
        times.push(began.elapsed().as_nanos() as u64 / share);
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::memory::MemoryStore;

    #[test]
    fn every_call_of_every_client_is_made_and_measured() -> Result<()> {
        let store = MemoryStore::new();
        let clients: [&dyn Store; 4] = [&store, &store, &store, &store];
        for name in ["set", "get", "add", "wait", "mix", "hand over", "meet"] {
            let measured = drive(&clients, Workload::named(name)?, 10)?;
            assert_eq!(measured.nanoseconds.len(), 40);
            assert!(measured.seconds > 0.0);
        }
        // "add" and "mix" both add.
        assert_eq!(store.add("sum", 0)?, 80);
        assert!(drive(&clients[..3], Workload::HandOver, 1).is_err());
        Ok(())
    }
}
