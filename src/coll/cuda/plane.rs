//! A group's GPUs: set up once by all ranks together, then launched on by each for itself.

use super::args::{Common, REPORT_WORDS};
use super::kernels::Kernels;
use super::layout::{Channel, Layout, MAX_RANKS};
use super::memory::{Memory, Own, Peer, Way};
use super::plan::{self, Facts, Plan, Tuning};
use super::prepare::{self, Launch, Site, segment, segment_bytes};
use super::{budget, cube, ledger, stats};
use crate::boot::pass::Mailbox;
use crate::coll::call::{Call, Span};
use crate::coll::describe::Description;
use crate::config::Config;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Kind, Result};
use crate::kernels::cuda::driver::{Device, Entered, Event, OwnStream, RelaxedCapture, Stream};
use crate::mem::layout::HEADER_BYTES;
use crate::mem::pinned::{Registered, Words};
use crate::rank::{Rank, name_ranks};
use crate::sync::board::Board;
use crate::sync::limit::Limit;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where work is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaTarget {
    /// torch's index of the device.
    pub device: i32,
    /// The `CUstream`.
    pub stream: usize,
    /// It is the group's own stream, beside the caller's (`async_op=True`).
    pub background: bool,
}

/// Gives every rank's bytes to every rank, in rank order; all give equally many.
pub type AllGather<'a> = dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>> + 'a;

/// Launches whose descriptions are kept for messages.
const REMEMBERED: usize = 1024;
/// Room for a sentence of a rank that failed in a step of the set-up.
const TEXT_BYTES: usize = 400;
/// How long kernels may take to notice that their group has failed.
const NOTICE: Duration = Duration::from_secs(2);

/// See the module.
pub struct Plane {
    board: Arc<Board>,
    layout: Layout,
    tuning: Tuning,
    state: Mutex<State>,
    report: Words,
    stop: Registered,
    edges: Option<cube::Edges>,
    memory: Memory,
    _share: budget::Share,
    _stream: OwnStream,
    // Last: everything above is given back in its context.
    device: Device,
}

struct State {
    kernels: Kernels,
    /// Where the calls of each channel went last.
    last: [Option<Last>; Channel::ALL.len()],
    launched: u64,
    recent: VecDeque<(u64, Description)>,
    edge: Event,
    /// The group is leaving: its memory goes once what was enqueued before is done.
    closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Last {
    stream: Stream,
    /// The capture that it was part of.
    capture: Option<u64>,
}

/// What a rank has before it tells the others; given back in this order.
struct Opened {
    stream: OwnStream,
    entered: Entered,
    capture: RelaxedCapture,
    mailbox: Mailbox,
    device: Device,
}

/// One step of the set-up that all ranks take: what each has to say, or why it cannot go on. Fails on all ranks alike.
fn step(gather: &AllGather<'_>, board: &Board, bytes: usize, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let mut message = vec![0u8; 1 + bytes.max(TEXT_BYTES)];
    match &own {
        Ok(said) => message[1..][..bytes].copy_from_slice(said),
        Err(error) => {
            message[0] = error.kind as u8;
            let text = error.message.as_bytes();
            let length = text.len().min(TEXT_BYTES);
            message[1..][..length].copy_from_slice(&text[..length]);
        }
    }
    let all = gather(&message)?;
    own?;
    for (rank, message) in board.ranks().zip(&all) {
        if message[0] != 0 {
            let text = String::from_utf8_lossy(&message[1..]);
            let text =
                format!("{} cannot use its GPU in group \"{}\": {}", board.describe(rank), board.name(), text.trim_end_matches('\0'));
            return Err(Error { kind: Kind::from_code(message[0]).unwrap_or(Kind::Internal), message: text });
        }
    }
    Ok(all.into_iter().map(|message| message[1..][..bytes].to_vec()).collect())
}

impl Plane {
    /// Sets up the group's GPUs; all ranks call it with a device of their own. Fails on all ranks alike.
    pub fn connect(board: &Arc<Board>, device: i32, limit: &Limit, gather: &AllGather<'_>) -> Result<Self> {
        let (config, me, n) = (Config::get(), board.rank().index(), board.size());
        let begun = Instant::now();
        let tuning = Tuning::of(n).overlaid(&config.cuda_tuning).unwrap_or_else(|complaint| {
            log::warn!("SYMM_CUDA_TUNING: {complaint}; ignored");
            Tuning::of(n)
        });
        // All that may fail on one rank alone is done before a step, so that nobody waits for a rank that has given up.
        let opened = || {
            if n > MAX_RANKS {
                return Err(Error::config(format!("a group of {n} ranks cannot use GPUs; {MAX_RANKS} is the most")));
            }
            let device = Device::open(device)?;
            let mailbox = Mailbox::open(n)?;
            ledger::reserve(board)?;
            let capture = RelaxedCapture::begin()?;
            let entered = device.enter()?;
            Ok(Opened { stream: OwnStream::new()?, entered, capture, mailbox, device })
        };
        let opened = opened();
        let said = opened.as_ref().map_err(Clone::clone).map(|Opened { device, mailbox, .. }| {
            let workspace = budget::offer(config.workspace_mb << 20) as u64;
            Peer { uuid: device.uuid, mailbox: mailbox.name(), workspace, p2p: config.p2p, tuning }.encode()
        });
        let peers = step(gather, board, Peer::BYTES, said)?;
        let peers: Option<Vec<Peer>> = peers.iter().map(|bytes| Peer::decode(bytes)).collect();
        let peers = peers.ok_or_else(|| Error::internal("a peer's description is cut short"))?;
        let Opened { stream, entered, capture: _capture, mailbox, device } = opened?;
        refuse_shared(board, &peers)?;
        refuse_other_tunings(board, &peers)?;
        let bytes = peers.iter().map(|peer| peer.workspace as usize).min().unwrap_or(0).max(Layout::least(n));
        let layout = Layout::new(n, bytes)?;
        let way = Way { board, device: &device, mailbox: &mailbox, peers: &peers, limit };
        let mut memory = None;
        if peers.iter().all(|peer| peer.p2p) {
            let own = Own::on_device(&device, bytes);
            // Too little memory is no reason to exchange through the host; a GPU that cannot share its memory is.
            let lacking = own.as_ref().err().filter(|error| error.kind == Kind::Config).cloned();
            step(gather, board, 0, lacking.map_or(Ok(Vec::new()), Err))?;
            memory = try_out(gather, &way, own, &layout, stream.stream(), &|_| true)?;
        }
        let memory = match memory {
            Some(memory) => memory,
            None => {
                log::warn!("group \"{}\": its GPUs exchange through the host's memory, since some cannot reach each other's", board.name());
                try_out(gather, &way, Own::on_host(bytes), &layout, stream.stream(), &|_| true)?.ok_or_else(|| {
                    Error::config(format!("the GPUs of group \"{}\" cannot exchange, not even through the host", board.name()))
                })?
            }
        };
        let edges = edges(&way, gather, &memory, stream.stream())?;
        let header = board.segment().ptr(0, HEADER_BYTES);
        let made = || {
            // SAFETY: the header is mapped as long as the board lives, and was reserved when the group was made.
            let stop = unsafe { Registered::new(header, HEADER_BYTES, Arc::clone(board) as Arc<_>) }?;
            Ok((stop, Words::new(REPORT_WORDS)?, Event::new()?))
        };
        let made = made();
        step(gather, board, 0, made.as_ref().map_err(Clone::clone).map(|_| Vec::new()))?;
        let (stop, report, edge) = made?;
        drop(entered);
        board.wait_unattended();
        let state = State {
            kernels: Kernels::new(&device, n, me, tuning.overlap != 0),
            last: [None; 4],
            launched: 0,
            recent: VecDeque::new(),
            edge,
            closed: false,
        };
        let (mebibytes, place) = (bytes >> 20, if memory.is_direct() { "on each GPU" } else { "of the host for each GPU" });
        log::info!(
            "group \"{}\": {mebibytes} MiB {place}, this rank's is cuda:{} ({}); ready after {:.0} ms",
            board.name(),
            device.ordinal(),
            device.bus,
            begun.elapsed().as_secs_f64() * 1e3
        );
        let apart = edges.as_ref().is_some_and(|edges| edges.apart.is_some());
        let share = budget::Share::take(bytes + if apart { Layout::least(n) } else { 0 });
        let board = Arc::clone(board);
        Ok(Self { board, layout, tuning, state: Mutex::new(state), report, stop, edges, memory, _share: share, _stream: stream, device })
    }

    /// torch's index of this rank's device.
    pub fn device(&self) -> i32 {
        self.device.ordinal()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic between two launches leaves nothing half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues `calls` in order; returns at once.
    pub fn launch(&self, calls: &[Call], target: CudaTarget, timeout: Duration) -> Result<()> {
        self.enqueue(target, timeout, |plane, state, stream, site| {
            for call in calls {
                state.launched += 1;
                ledger::compare(&plane.board, state.launched, call)?;
                if state.recent.len() == REMEMBERED {
                    state.recent.pop_front();
                }
                state.recent.push_back((state.launched, Description::of(call)));
                let plan = plan::choose(call, &plane.facts());
                stats::count(Some(call.op), plan.name());
                let site = Site { common: Common { call: state.launched, ..site.common }, ..site };
                let mut enqueue = |call: &Call, plan: Plan| match site.prepare(call, plan) {
                    Some(launch) => state.kernels.launch(&launch, call.dtype, call.reduce_op, stream),
                    None => Ok(()),
                };
                let n = plane.board.size();
                if call.longest() <= segment_bytes(n) {
                    enqueue(call, plan)?;
                    continue;
                }
                for (index, part) in (0..).map_while(|index| segment(call, n, index).map(|part| (index, part))) {
                    enqueue(&part, plan.of_segment(index))?;
                }
            }
            Ok(())
        })
    }

    /// Enqueues sends `(to whom, what)` and receives `(from whom, where)`; those between the same two ranks in their order.
    pub fn transfer(&self, sends: &[(Rank, Span)], receives: &[(Rank, Span)], target: CudaTarget, timeout: Duration) -> Result<()> {
        let mut sends: Vec<(usize, Span)> = sends.iter().map(|&(rank, span)| (rank.index(), span)).collect();
        let mut receives: Vec<(usize, Span)> = receives.iter().map(|&(rank, span)| (rank.index(), span)).collect();
        self.enqueue(target, timeout, |plane, state, stream, site| {
            let plan = plan::transfers(&plane.layout, &plane.tuning);
            keep_own(plane.board.rank(), &mut sends, &mut receives, stream)?;
            while !sends.is_empty() || !receives.is_empty() {
                let (out, incoming) = (first_of_each(&mut sends), first_of_each(&mut receives));
                stats::count(None, plan.name());
                let launch: Launch = site.transfers(&out, &incoming, plan)?;
                state.kernels.launch(&launch, DType::U8, ReduceOp::Sum, stream)?;
            }
            Ok(())
        })
    }

    fn facts(&self) -> Facts<'_> {
        Facts { n: self.board.size(), layout: &self.layout, tuning: &self.tuning, cube_mesh: self.edges.is_some() }
    }

    fn site(&self, channel: Channel, timeout: Duration) -> Site<'_> {
        let me = self.board.rank().index();
        let mut peer = [0; MAX_RANKS];
        for (address, base) in peer.iter_mut().zip(self.memory.addresses()) {
            *address = base + self.layout.channel(channel) as u64;
        }
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let common = Common { peer, stop: self.stop.device(), report: self.report.device(), timeout, call: 0 };
        let edges = self.edges.as_ref().map(|edges| prepare::Edges { mesh: &edges.mesh, peer: edges.reach(me, channel, &peer) });
        Site { me, n: self.board.size(), layout: &self.layout, edges, threads: self.tuning.threads as u32, common }
    }

    fn enqueue(
        &self,
        target: CudaTarget,
        timeout: Duration,
        body: impl FnOnce(&Self, &mut State, Stream, Site<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let stream = Stream(target.stream);
        let entered = self.device.enter()?;
        let mut state = self.state();
        if state.closed {
            return Err(Error::aborted(format!("group \"{}\" was destroyed", self.board.name())));
        }
        let capture = stream.capture()?;
        let channel = match (capture.is_some(), target.background) {
            (false, false) => Channel::Foreground,
            (false, true) => Channel::Background,
            (true, false) => Channel::CapturedForeground,
            (true, true) => Channel::CapturedBackground,
        };
        let now = Last { stream, capture };
        if let Some(last) = state.last[channel as usize].filter(|last| last.stream != stream && last.capture == capture) {
            // Calls of one channel follow each other on the device, whatever streams they are given.
            state.edge.record(last.stream)?;
            stream.wait(&state.edge)?;
        }
        state.last[channel as usize] = Some(now);
        let outcome = body(self, &mut state, stream, self.site(channel, timeout));
        drop(state);
        drop(entered);
        // Whatever failed half-way leaves peers waiting for a kernel that does not come; a bad argument was refused before.
        outcome.map_err(|error| if error.kind == Kind::Value { error } else { self.board.fail(error) })
    }

    /// Why the group has failed, if it has: on the host, or in a kernel of this rank.
    pub fn failure(&self) -> Option<Error> {
        if let Some(failure) = self.board.failure() {
            return Some(failure);
        }
        let words = self.report.get();
        if words[0].load(Ordering::Acquire) == 0 {
            return None;
        }
        let word = |i: usize| words[i].load(Ordering::Relaxed);
        let number = u64::from(word(1)) | u64::from(word(2)) << 32;
        let waited_for = self.board.peers().filter(|rank| word(4 + rank.index()) != 0);
        // Whoever has not launched the call is why others, who have, did not send either.
        let late: Vec<Rank> = self.board.peers().filter(|&rank| ledger::launched(&self.board, rank) < number).collect();
        let missing: Vec<Rank> = if late.is_empty() { waited_for.collect() } else { late };
        let (me, seconds) = (self.board.describe(self.board.rank()), f64::from(word(3)) / 1e3);
        let state = self.state();
        let about = state.recent.iter().find(|(known, _)| *known == number).map(|(_, description)| description.to_string());
        drop(state);
        let about = about.unwrap_or_else(|| if number == 0 { "a send or receive".into() } else { "a call recorded into a graph".into() });
        let doing = |rank: &Rank| {
            let pid = self.board.pid(*rank);
            let state = crate::sys::process::state(pid).unwrap_or("gone");
            format!("rank {rank}: pid {pid} {state}, {} CUDA collectives launched", ledger::launched(&self.board, *rank))
        };
        let states: Vec<String> = missing.iter().map(doing).collect();
        let text = format!(
            "{me} waited {seconds:.1} s until its timeout in {about}, CUDA collective #{number} of group \"{}\", for {} ({})",
            self.board.name(),
            name_ranks(&missing),
            states.join("; ")
        );
        Some(self.board.fail(Error::timeout(text)))
    }

    /// Waits until the kernels that were enqueued are done, at most `limit`; those that are not are made to end. False if they have not
    /// even so: their memory must stay. Nothing can be enqueued afterwards.
    #[must_use = "memory that kernels use must not be given back"]
    pub fn drain(&self, limit: Duration) -> bool {
        self.state().closed = true;
        let Ok(_entered) = self.device.enter() else { return false };
        let events: Vec<Event> = {
            let state = self.state();
            // What was recorded into a graph is not running because of us.
            let mark = |last: &Last| Event::new().and_then(|event| event.record(last.stream).map(|()| event)).ok();
            state.last.iter().flatten().filter(|last| last.capture.is_none()).filter_map(mark).collect()
        };
        let wait = |limit: Duration| {
            let begun = Instant::now();
            while !events.iter().all(|event| event.passed().unwrap_or(true)) {
                if begun.elapsed() > limit {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
            true
        };
        if !wait(limit) {
            let text = format!("{} left group \"{}\" with CUDA work under way", self.board.describe(self.board.rank()), self.board.name());
            self.board.fail(Error::aborted(text));
            return wait(NOTICE);
        }
        true
    }

    /// Gives everything back. After `drain`.
    pub fn release(self) {
        let Self { device, state, report, stop, memory, _stream: stream, .. } = self;
        // A thread that leaves a group need not have a context, without which the driver keeps what it was to give back.
        let entered = device.enter();
        drop((state, report, stop, memory, stream));
        drop(entered);
    }
}

/// Copies what this rank sends to itself, which must be received in the same launch.
fn keep_own(me: Rank, sends: &mut Vec<(usize, Span)>, receives: &mut Vec<(usize, Span)>, stream: Stream) -> Result<()> {
    let own = |messages: &mut Vec<(usize, Span)>| -> Vec<Span> {
        let (own, rest) = messages.drain(..).partition::<Vec<_>, _>(|(rank, _)| *rank == me.index());
        *messages = rest;
        own.into_iter().map(|(_, span)| span).collect()
    };
    let (out, incoming) = (own(sends), own(receives));
    if out.len() != incoming.len() || out.iter().zip(&incoming).any(|(from, to)| from.bytes != to.bytes) {
        return Err(Error::value(format!(
            "rank {me} sends {} messages to itself and receives {} of its own; they must match within one batch",
            out.len(),
            incoming.len()
        )));
    }
    out.iter().zip(&incoming).try_for_each(|(from, to)| stream.copy(to.addr as u64, from.addr as u64, from.bytes))
}

/// The first message for each rank, taken out of `messages`.
fn first_of_each(messages: &mut Vec<(usize, Span)>) -> Vec<(usize, Span)> {
    let mut seen = [false; MAX_RANKS];
    let (first, rest) = messages.drain(..).partition(|(rank, _)| !std::mem::replace(&mut seen[*rank], true));
    *messages = rest;
    first
}

/// The memory of the ranks that this one must reach, if every rank made its own and reaches those it must; `None` if not.
fn try_out(
    gather: &AllGather<'_>,
    way: &Way<'_>,
    own: Result<Own>,
    layout: &Layout,
    stream: Stream,
    reaches: &dyn Fn(usize) -> bool,
) -> Result<Option<Memory>> {
    let me = way.board.rank().index();
    let all = |yes: bool| step(gather, way.board, 1, Ok(vec![u8::from(yes)])).map(|answers| answers.iter().all(|answer| answer[0] == 1));
    let noted = |error: Error| log::info!("{error}");
    let own = own.map_err(noted);
    // Before any rank waits for what another passes.
    if !all(own.is_ok())? {
        return Ok(None);
    }
    let share = |own: Own| {
        let memory = Memory::shared(way, own, reaches)?;
        memory.clear(me, layout, stream)?;
        Ok(memory)
    };
    let made = own.and_then(|own| share(own).map_err(noted)).ok();
    if !all(made.is_some())? {
        return Ok(None);
    }
    let Some(memory) = made else { return Ok(None) };
    if !all(memory.probe(me, layout, stream).unwrap_or(false))? {
        return Ok(None);
    }
    Ok(all(memory.probed(me, layout, stream).unwrap_or(false))?.then_some(memory))
}

/// The edges of the group's GPUs, if all ranks see the same hybrid cube mesh and can use it.
fn edges(way: &Way<'_>, gather: &AllGather<'_>, memory: &Memory, stream: Stream) -> Result<Option<cube::Edges>> {
    let (board, me) = (way.board, way.board.rank().index());
    if way.peers.len() != cube::RANKS || !way.peers.iter().all(|peer| peer.p2p) {
        return Ok(None);
    }
    let mesh = cube::detected(way.peers);
    let own = cube::encoded(mesh.as_ref());
    let said = step(gather, board, cube::BYTES, Ok(own.clone()))?;
    if said.iter().any(|other| *other != own) {
        log::warn!("group \"{}\": ranks disagree on how their GPUs are linked; nobody goes by it", board.name());
        return Ok(None);
    }
    let Some(mesh) = mesh else { return Ok(None) };
    log::info!("group \"{}\": its GPUs are a hybrid cube mesh of ranks {:?} and {:?}", board.name(), mesh.quad[0], mesh.quad[1]);
    if memory.is_direct() {
        return Ok(Some(cube::Edges { mesh, apart: None }));
    }
    let bytes = Layout::least(cube::RANKS);
    let layout = Layout::new(cube::RANKS, bytes)?;
    let memory = try_out(gather, way, Own::on_device(way.device, bytes), &layout, stream, &|rank| cube::reaches(&mesh, me, rank))?;
    Ok(memory.map(|memory| cube::Edges { mesh, apart: Some((memory, layout)) }))
}

fn refuse_shared(board: &Board, peers: &[Peer]) -> Result<()> {
    for (rank, peer) in board.ranks().zip(peers) {
        if let Some((other, _)) = board.ranks().zip(peers).find(|(other, them)| *other < rank && them.uuid == peer.uuid) {
            let (one, two, group) = (board.describe(other), board.describe(rank), board.name());
            let uuid: String = peer.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            return Err(Error::config(format!(
                "{one} and {two} of group \"{group}\" use the same GPU ({uuid}); each rank needs its own: call torch.cuda.set_device(local_rank) first"
            )));
        }
    }
    Ok(())
}

/// Ranks under different tunings would choose different kernels for one call.
fn refuse_other_tunings(board: &Board, peers: &[Peer]) -> Result<()> {
    let Some((rank, other)) = board.ranks().zip(peers).find(|(_, peer)| peer.tuning != peers[0].tuning) else { return Ok(()) };
    let (one, two, group) = (board.describe(Rank(0)), board.describe(rank), board.name());
    Err(Error::config(format!(
        "{one} and {two} of group \"{group}\" differ in SYMM_CUDA_TUNING: {:?} and {:?}; set it alike on all ranks",
        peers[0].tuning, other.tuning
    )))
}
