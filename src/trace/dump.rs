//! The dump: everything that the recorder keeps, as JSON (`docs/design/trace.md`).

use super::clock::WallClock;
use super::entry::{CallKind, CallTarget, EntryState, InternodePhase, TraceEntry};
use super::registry::{self, DumpPeer, GroupRecord, ObservedFailure};
use super::{FlightRecorder, KEPT, dump_dir, totals};
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::sys::node_id;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

/// Version of the dump, raised when a field changes its meaning.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Dump {
    format: &'static str,
    version: u32,
    library: &'static str,
    host: String,
    boot_id: String,
    boot_time_ns: u64,
    pid: u32,
    written_ns: Option<u64>,
    calls_made: u64,
    calls_kept: usize,
    groups: Vec<DumpGroup>,
    calls: Vec<DumpCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    totals: Option<totals::TotalsReport>,
}

#[derive(Serialize)]
struct DumpGroup {
    id: u64,
    memory: u64,
    name: String,
    rank: u32,
    members: Vec<registry::DumpMember>,
    world: usize,
    global_ranks: Vec<u32>,
    other_nodes: Option<String>,
    timeout_ms: u64,
    joined_ns: Option<u64>,
    left_ns: Option<u64>,
    begun: u64,
    launched: Option<u64>,
    failure: Option<FailureText>,
    peers: Vec<DumpPeer>,
}

#[derive(Serialize)]
struct FailureText {
    kind: &'static str,
    message: String,
    seen_ns: Option<u64>,
}

#[derive(Serialize)]
struct DumpCall {
    number: u64,
    group: u64,
    op: &'static str,
    call: String,
    sequence: Option<u64>,
    dtype: &'static str,
    itemsize: usize,
    elements: u64,
    reduce_op: Option<&'static str>,
    root: Option<u32>,
    peer: Option<u32>,
    internode: bool,
    tag: Option<i32>,
    even: bool,
    bytes_in: u64,
    bytes_out: u64,
    #[serde(rename = "async")]
    asynchronous: bool,
    device: String,
    stream: Option<usize>,
    background: Option<bool>,
    timeout_ms: u64,
    created_ns: Option<u64>,
    started_ns: Option<u64>,
    ended_ns: Option<u64>,
    state: &'static str,
    outcome: Option<&'static str>,
    phase: Option<String>,
    phase_ns: Option<u64>,
    algorithm: Option<&'static str>,
    waited_ns: Option<u64>,
    waited_for: Option<u32>,
}

/// Returns the name of the exception that callers get for a kind of failure.
const fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Peer => "SymmPeerError",
        ErrorKind::Timeout | ErrorKind::WaitTimeout => "SymmTimeoutError",
        ErrorKind::Mismatch => "SymmMismatchError",
        ErrorKind::Config => "SymmConfigError",
        ErrorKind::Aborted => "SymmAbortedError",
        ErrorKind::Value => "ValueError",
        ErrorKind::Type => "TypeError",
        ErrorKind::NotImplemented => "NotImplementedError",
        ErrorKind::Internal => "DistBackendError",
        ErrorKind::Network => "DistNetworkError",
        ErrorKind::QueueEmpty => "QueueEmptyError",
    }
}

fn group(record: &GroupRecord, day: WallClock) -> DumpGroup {
    let (begun, launched) = record.last();
    let failure = record.failure.as_ref();
    let text = |failure: &ObservedFailure| FailureText {
        kind: kind_name(failure.kind),
        message: failure.message.clone(),
        seen_ns: day.of(failure.at),
    };
    DumpGroup {
        id: record.id,
        memory: record.memory,
        name: record.name.clone(),
        rank: record.own_rank(),
        members: record.members.clone(),
        world: record.global_ranks.len(),
        global_ranks: record.global_ranks.clone(),
        other_nodes: record.other_nodes.clone(),
        timeout_ms: record.timeout_ms,
        joined_ns: day.of(record.joined),
        left_ns: day.of(record.left),
        begun,
        launched,
        failure: failure.map(text),
        peers: failure.map_or_else(|| record.peers(), |failure| failure.peers.clone()),
    }
}

/// Describes the `phase` of a multi-node collective, now or when it failed.
fn phase_text(entry: &TraceEntry, phase: InternodePhase, group: &GroupRecord) -> String {
    let late = group
        .late_nodes
        .as_ref()
        .filter(|(sequence, _)| entry.place == CallTarget::Cpu && *sequence == entry.sequence)
        .map(|(_, nodes)| nodes);
    let waiting = late.or(group.other_nodes.as_ref()).map_or("other nodes", String::as_str);
    match phase {
        InternodePhase::IntraNode => "inside the node".into(),
        InternodePhase::Rail(rail) => format!("rail {rail}, waiting for {waiting}"),
        InternodePhase::Enqueued(None) => "enqueued".into(),
        InternodePhase::Enqueued(Some(rail)) => format!("enqueued on rail {rail}"),
        InternodePhase::Running(None) => "begun on the GPU".into(),
        InternodePhase::Running(Some(rail)) => {
            format!("begun on the GPU, inside the node or on rail {rail} with {waiting}")
        }
    }
}

fn call(entry: &TraceEntry, group: &GroupRecord, day: WallClock) -> DumpCall {
    let bytes = entry.bytes_in.max(entry.bytes_out);
    let with = |tag: i32| {
        format!("({} × {}, {bytes} bytes, tag {tag})", entry.elements(), entry.dtype.name())
    };
    let (op, text, reduce_op, root, peer, tag, even) = match entry.what {
        CallKind::Collective { op, reduce_op, root, description, even } => {
            let reduce_op = op.reduces().then(|| reduce_op.name());
            (
                op.name(),
                description.to_string(),
                reduce_op,
                op.rooted().then_some(root.0),
                None,
                None,
                even,
            )
        }
        CallKind::Send { peer, tag } => {
            ("send", format!("send{}", with(tag)), None, None, peer, Some(tag), true)
        }
        CallKind::Receive { peer, tag } => {
            ("recv", format!("recv{}", with(tag)), None, None, peer, Some(tag), true)
        }
    };
    let (device, stream, background) = match entry.place {
        CallTarget::Cpu => ("cpu".into(), None, None),
        CallTarget::Cuda { device, stream, background } => {
            (format!("cuda:{device}"), Some(stream), Some(background))
        }
    };
    let phase = entry.phase.filter(|_| entry.state != EntryState::Completed);
    let (state, outcome) = match entry.state {
        EntryState::Scheduled => ("scheduled", None),
        EntryState::Started => ("started", None),
        EntryState::Completed => ("completed", None),
        EntryState::Failed(kind) => ("failed", Some(kind_name(kind))),
    };
    DumpCall {
        number: entry.number,
        group: entry.group,
        op,
        call: text,
        sequence: Some(entry.sequence).filter(|&sequence| sequence != 0),
        dtype: entry.dtype.name(),
        itemsize: entry.dtype.size(),
        elements: entry.elements(),
        reduce_op,
        root,
        peer: peer.map(|peer| if entry.internode { peer.0 } else { group.rank_of(peer) }),
        internode: entry.internode,
        tag,
        even,
        bytes_in: entry.bytes_in,
        bytes_out: entry.bytes_out,
        asynchronous: entry.asynchronous,
        device,
        stream,
        background,
        timeout_ms: entry.timeout_ms,
        created_ns: day.of(entry.created),
        started_ns: day.of(entry.started),
        ended_ns: day.of(entry.ended),
        state,
        outcome,
        phase: phase.map(|(phase, _)| phase_text(entry, phase, group)),
        phase_ns: phase.and_then(|(_, at)| day.of(at)),
        algorithm: Some(entry.algorithm).filter(|name| !name.is_empty()),
        waited_ns: entry.waited.map(|(time, _)| time),
        waited_for: entry.waited.and_then(|(_, last)| last).map(|rank| rank.0),
    }
}

/// Renders the contents of `journal` as JSON.
pub(super) fn render(journal: &FlightRecorder) -> Result<String> {
    let day = WallClock::now();
    let records = lock(&journal.groups).records();
    let known: HashMap<u64, &GroupRecord> =
        records.iter().map(|record| (record.id, record)).collect();
    let entries = journal.ring.copy();
    let dump = Dump {
        format: "torch-symm trace",
        version: VERSION,
        library: env!("TORCH_SYMM_VERSION"),
        host: node_id::name(),
        boot_id: node_id::NodeId::own().map(|node| node.boot).unwrap_or_default(),
        boot_time_ns: day.booted(),
        pid: std::process::id(),
        written_ns: day.of(super::clock::now()),
        calls_made: journal.ring.made(),
        calls_kept: KEPT,
        groups: records.iter().map(|record| group(record, day)).collect(),
        calls: entries
            .iter()
            .filter_map(|entry| known.get(&entry.group).map(|record| call(entry, record, day)))
            .collect(),
        totals: journal.totals.as_ref().map(|totals| totals.report(day)),
    };
    serde_json::to_string(&dump)
        .map_err(|error| Error::internal(format!("a trace is no JSON: {error}")))
}

/// Writes the dump of the process of global rank `global` on its own thread, because a file system
/// that hangs must not hold up the failed call. `None` if no thread can be started. The thread logs
/// the path and `cause`, because the launcher may end this process before it can report the failure
/// itself.
pub(super) fn begin(
    journal: &'static FlightRecorder,
    global: u32,
    cause: &Error,
) -> Option<Receiver<()>> {
    let (done, written) = channel();
    let cause = format!("{}: {cause}", kind_name(cause.kind));
    let thread = crate::sys::thread::spawn("symm-trace", None, move || {
        match write(journal, global) {
            Ok(path) if tell(&path) => {
                let (path, folder) = (path.display(), path.parent().unwrap_or(&path).display());
                log::warn!(
                    "{cause}; the last calls of this process are in {path}; for those of all \
                     ranks: python -m torch_symm trace {folder}"
                );
            }
            Ok(_) => {}
            Err(error) => {
                log::warn!("{cause}; the last calls of this process could not be written: {error}")
            }
        }
        // The caller may have stopped waiting.
        let _ = done.send(());
    });
    thread
        .inspect_err(|error| {
            log::warn!("the last calls of this process could not be written: no thread: {error}")
        })
        .ok()?;
    Some(written)
}

fn write(journal: &FlightRecorder, global: u32) -> Result<PathBuf> {
    dump_dir::keep(
        &format!("trace-{}-rank{global}.json", std::process::id()),
        render(journal)?.as_bytes(),
    )
}

/// Returns true if `path` has not been logged before.
fn tell(path: &std::path::Path) -> bool {
    static WARNED: crate::sys::fork::PerProcess<Mutex<HashSet<PathBuf>>> =
        crate::sys::fork::PerProcess::new(|| Mutex::new(HashSet::new()));
    lock(WARNED.get()).insert(path.to_owned())
}
