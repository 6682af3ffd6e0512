//! Noticing the end of other processes: one thread per process, whatever the number of groups.

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sys::{fork, pidfd};
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Hears that the process of a rank has ended, and how.
pub type OnExit = Arc<dyn Fn(Rank, String) + Send + Sync>;

/// Ends the watching of one group's members when dropped.
#[derive(Debug)]
pub struct Subscription {
    id: u64,
    generation: u64,
}

struct Listener {
    subscription: u64,
    rank: Rank,
    on_exit: OnExit,
}

/// A watched process.
struct Entry {
    handle: Arc<OwnedFd>,
    listeners: Vec<Listener>,
}

struct Watcher {
    epoll: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    entries: BTreeMap<u64, Entry>,
    next: u64,
    generation: u64,
}

/// Marks the event that ends the thread; no descriptor has this number.
const STOP: u64 = u64::MAX;
/// How long to wait for the parent of an ended process to collect it, so that the kernel tells how it ended.
const COLLECT: Duration = Duration::from_millis(20);

static WATCHER: Mutex<Option<Watcher>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Watcher>> {
    WATCHER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `on_exit` once for each of `members` whose process ends, from now on.
pub fn watch(members: &[(Rank, Arc<OwnedFd>)], on_exit: &OnExit) -> Result<Subscription> {
    let generation = fork::generation();
    let mut guard = lock();
    // A forked child inherits the parent's watcher, but not its thread.
    if guard.as_ref().is_none_or(|watcher| watcher.generation != generation) {
        *guard = Some(Watcher::start(generation)?);
    }
    let Some(watcher) = guard.as_mut() else { return Err(Error::internal("the watcher is gone")) };
    let id = watcher.next;
    watcher.next += 1;
    for (rank, handle) in members {
        let key = handle.as_raw_fd() as u64;
        if !watcher.entries.contains_key(&key) {
            epoll::add(&watcher.epoll, handle, epoll::EventData::new_u64(key), epoll::EventFlags::IN)
                .map_err(|e| Error::os("watching a process", e))?;
            watcher.entries.insert(key, Entry { handle: Arc::clone(handle), listeners: Vec::new() });
        }
        if let Some(entry) = watcher.entries.get_mut(&key) {
            entry.listeners.push(Listener { subscription: id, rank: *rank, on_exit: Arc::clone(on_exit) });
        }
    }
    Ok(Subscription { id, generation })
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if fork::generation() != self.generation {
            return;
        }
        let mut guard = lock();
        let Some(watcher) = guard.as_mut() else { return };
        let epoll = Arc::clone(&watcher.epoll);
        watcher.entries.retain(|_, entry| {
            entry.listeners.retain(|listener| listener.subscription != self.id);
            if entry.listeners.is_empty() {
                let _ = epoll::delete(&epoll, &entry.handle);
            }
            !entry.listeners.is_empty()
        });
        if watcher.entries.is_empty() {
            let _ = rustix::io::write(&watcher.stop, &1u64.to_ne_bytes());
            *guard = None;
        }
    }
}

impl Watcher {
    fn start(generation: u64) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::os("epoll_create", e))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::os("eventfd", e))?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN).map_err(|e| Error::os("epoll_ctl", e))?;
        let (epoll, stop) = (Arc::new(epoll), Arc::new(stop));
        // The thread holds `stop` too: closing the last copy would take the event back before the thread has seen it.
        let for_thread = (Arc::clone(&epoll), Arc::clone(&stop));
        std::thread::Builder::new()
            .name("symm-watch".into())
            .spawn(move || listen(&for_thread.0, &for_thread.1))
            .map_err(|e| Error::internal(format!("starting the thread that watches other ranks: {e}")))?;
        Ok(Self { epoll, stop, entries: BTreeMap::new(), next: 1, generation })
    }
}

fn listen(epoll: &Arc<OwnedFd>, _stop: &OwnedFd) {
    loop {
        let mut events = Vec::with_capacity(16);
        if epoll::wait(&**epoll, rustix::buffer::spare_capacity(&mut events), None).is_err() {
            continue;
        }
        for event in events {
            let key = event.data.u64();
            if key == STOP {
                return;
            }
            let entry = {
                let mut guard = lock();
                let Some(watcher) = guard.as_mut().filter(|watcher| Arc::ptr_eq(&watcher.epoll, epoll)) else { return };
                let entry = watcher.entries.remove(&key);
                if let Some(entry) = &entry {
                    let _ = epoll::delete(&**epoll, &entry.handle);
                }
                entry
            };
            if let Some(entry) = entry {
                let how = describe_end(&entry.handle);
                for listener in &entry.listeners {
                    (listener.on_exit)(listener.rank, how.clone());
                }
            }
        }
    }
}

fn describe_end(handle: &OwnedFd) -> String {
    let start = std::time::Instant::now();
    loop {
        if let Some(how) = pidfd::how_it_ended(handle) {
            return how;
        }
        if start.elapsed() > COLLECT {
            return "is gone (its process has ended)".into();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_killed_process_is_reported_soon_and_once() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("spawn");
        let process = (child.id(), pidfd::start_time(child.id()).expect("runs"));
        let handle = pidfd::shared(process, pidfd::open(process).expect("pidfd"));
        let (sender, receiver) = channel();
        let on_exit: OnExit = Arc::new(move |rank, how| sender.send((rank, how)).expect("receiver lives"));
        let _first = watch(&[(Rank(3), Arc::clone(&handle))], &on_exit).expect("watch");
        drop(watch(&[(Rank(4), handle)], &on_exit).expect("watch"));
        child.kill().expect("kill");
        child.wait().expect("wait");
        let (rank, how) = receiver.recv_timeout(Duration::from_secs(1)).expect("reported");
        assert_eq!(rank, Rank(3));
        assert!(how.contains("SIGKILL") || how.contains("gone"), "{how}");
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err(), "once, and not to the dropped subscription");
    }
}
