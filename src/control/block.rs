//! A member's view of the group's control block, and what each member says of itself there.
#![allow(unsafe_code, reason = "words at offsets of shared memory")]

use super::call_state::{Awaited, Barriers, Doing, Refusals};
use super::patience::{PATIENCE, now};
use crate::lock::lock;
use crate::mem::layout::{HEADER_BYTES, Layout, MEMBER_BYTES};
use crate::mem::shm::Segment;
use crate::op::Op;
use crate::rank::Rank;
use crate::sync::doorbell::{Doorbell, Sleepers};
use crate::sync::failure::FirstFailure;
use crate::sync::shared_text::SharedText;
use crate::sys::core;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock};

/// Turns of spinning, some 40 ns each, where other processes have lately taken this one's cores: a peer that runs answers by then.
const SPINS_SHORT: u32 = 64;

/// Shared by all members.
#[repr(C, align(128))]
pub(super) struct Header {
    pub(super) failure: FirstFailure,
    pub(super) sleepers: AlignedSleepers,
}

/// Count of sleepers on its own pair of lines: a publisher reads it after every flag.
#[repr(C, align(128))]
pub(super) struct AlignedSleepers(pub(super) Sleepers);

/// Words of one member, which alone writes them, except for its bell.
#[repr(C, align(128))]
pub(super) struct MemberWords {
    stage: AtomicU64,
    pub(super) bell: AlignedBell,
    pub(super) departed: AtomicU32,
    phase: AtomicU32,
    capable: AtomicU32,
    probe: AtomicU64,
    /// The last collective begun, see [`Doing`]; 0: none.
    pub(super) doing: AtomicU64,
    /// The message that a thread sleeps for, see [`Awaited`]; 0: none.
    awaited: AtomicU64,
    /// Its barriers of symmetric memory, see [`Barriers`].
    barriers: AtomicU64,
    /// Times at which the last collective of even and of odd number began.
    starts: [AtomicU64; 2],
    /// What it has refused last, see [`Refusals`].
    refusals: AtomicU64,
    attending: AtomicU32,
    /// Number of the core, plus 1, where it last began something; 0: nothing begun yet.
    pub(super) core: AtomicU32,
    call_site: AlignedText,
    /// Error with which it has left; read once `departed` is set.
    pub(super) farewell: AlignedText,
}

#[repr(C, align(128))]
pub(super) struct AlignedBell(pub(super) Doorbell);

#[repr(C, align(128))]
pub(super) struct AlignedText(pub(super) SharedText);

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES && size_of::<MemberWords>() <= MEMBER_BYTES);

/// Identity of a member, as messages name it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Process id.
    pub pid: u32,
    /// Rank in the default group.
    pub global: u32,
}

/// Place of a group that is the part of a larger one on one host, for messages: they name members as the larger group does.
#[derive(Clone, Debug)]
pub struct Part {
    /// Name of the host.
    pub host: String,
    /// Ranks of the members in the larger group.
    pub ranks: Vec<Rank>,
}

/// Progress, in words, of the calls of a rank that kernels make.
pub type Progress = fn(&ControlBlock, Rank) -> String;

/// A member's view of its group.
#[derive(Debug)]
pub struct ControlBlock {
    pub(super) segment: Segment,
    pub(super) layout: Layout,
    pub(super) rank: Rank,
    pub(super) name: String,
    pub(super) members: Vec<Identity>,
    part: Option<Part>,
    /// Name of the larger group's call that this member runs collectives for; empty: none yet.
    asked: Mutex<String>,
    pub(super) gone: Vec<OnceLock<String>>,
    /// The first of them, as far as this member has seen.
    pub(super) first_gone: OnceLock<Rank>,
    /// Progress of calls that kernels make, in words. It is set once kernels wait for peers without looking at this process: a member's
    /// death fails the group at once then.
    pub(super) unattended: OnceLock<Progress>,
    pub(super) spins: u32,
    /// Number of times that this rank found itself in a peer's way.
    pub(super) crowded: AtomicU32,
    /// The early warning was given: one of a group is enough to look at the job.
    pub(super) warned: AtomicBool,
}

impl ControlBlock {
    /// The view of `rank` in the group `name`; `spins` turns are spent before the core is given away.
    pub fn new(segment: Segment, rank: Rank, name: String, members: Vec<Identity>, spins: u32) -> Self {
        let layout = Layout::new(members.len());
        let gone = members.iter().map(|_| OnceLock::new()).collect();
        Self {
            segment,
            layout,
            rank,
            name,
            members,
            part: None,
            asked: Mutex::default(),
            gone,
            first_gone: OnceLock::new(),
            unattended: OnceLock::new(),
            spins,
            crowded: AtomicU32::new(0),
            warned: AtomicBool::new(false),
        }
    }

    /// The view, with members named as those of the group that this one is a part of.
    pub fn named(self, part: Option<Part>) -> Self {
        Self { part: part.filter(|part| part.ranks.len() == self.members.len()), ..self }
    }

    /// Number of this member.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> impl DoubleEndedIterator<Item = Rank> + use<> {
        (0..self.members.len() as u32).map(Rank)
    }

    /// Peers of this rank, starting with the next rank: peers do not all look at the same member first.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (me, n) = (self.rank.0, self.members.len() as u32);
        (1..n).map(move |step| Rank((me + step) % n))
    }

    /// Turns of spinning before a waiting thread gives its core away.
    #[inline]
    pub fn spins(&self) -> u32 {
        if PATIENCE.is_short(now) { self.spins.min(SPINS_SHORT) } else { self.spins }
    }

    /// The group's memory.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Layout of the shared memory.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: Header consists of atomics, and every member's offset 0 holds a Header.
        unsafe { self.segment.at(0) }
    }

    pub(super) fn words(&self, rank: Rank) -> &MemberWords {
        // SAFETY: MemberWords consists of atomics, and `layout.member` is the offset of one for every rank.
        unsafe { self.segment.at(self.layout.member(rank)) }
    }

    /// Counts the stages of pipelined collectives that `rank` has finished; see `coll::cpu::pipeline`.
    pub fn stage(&self, rank: Rank) -> &AtomicU64 {
        &self.words(rank).stage
    }

    /// Number of the last collective that `rank` has begun.
    pub fn collective(&self, rank: Rank) -> u64 {
        self.doing(rank).map_or(0, |doing| doing.number)
    }

    /// The last collective that `rank` has begun.
    pub fn doing(&self, rank: Rank) -> Option<Doing> {
        Doing::of(self.words(rank).doing.load(Ordering::Relaxed))
    }

    /// Phase of joining that `rank` has reached.
    pub fn phase(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).phase
    }

    /// Address of a word in the private memory of `rank` that holds its own address, for trying `process_vm_readv`.
    pub fn probe(&self, rank: Rank) -> &AtomicU64 {
        &self.words(rank).probe
    }

    /// Word that is 1 if `rank` could read the memory of every peer.
    pub fn capable(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).capable
    }

    /// Tells peers that this rank begins collective `number`, and on which core.
    pub fn begin(&self, number: u64, op: Op) {
        self.words(self.rank).doing.store(Doing { number, op, finished: false }.word(), Ordering::Relaxed);
        self.note_core();
    }

    /// Time at which `rank` began collective `number`, in nanoseconds of the host's monotonic clock, as the rank itself writes it before
    /// it posts its call. Nobody begins the next but one before every rank has begun the next.
    pub fn start(&self, rank: Rank, number: u64) -> &AtomicU64 {
        &self.words(rank).starts[(number % 2) as usize]
    }

    /// Tells peers that this rank has finished its part of that collective.
    pub fn finish(&self, number: u64, op: Op) {
        self.words(self.rank).doing.store(Doing { number, op, finished: true }.word(), Ordering::Relaxed);
    }

    /// Call site of the call that `rank` has posted last, if it says so. It is written before the post, and not again before every member
    /// has seen that the calls agree.
    pub fn call_site(&self, rank: Rank) -> &SharedText {
        &self.words(rank).call_site.0
    }

    fn note_core(&self) {
        self.words(self.rank).core.store(core::current() as u32 + 1, Ordering::Relaxed);
    }

    /// Tells peers whether a thread of this rank is busy moving messages along.
    pub fn attend(&self, attending: bool) {
        self.note_core();
        self.words(self.rank).attending.store(attending.into(), Ordering::Relaxed);
    }

    /// Whether a thread of `rank` is busy moving messages along. A hint.
    pub fn attends(&self, rank: Rank) -> bool {
        self.words(rank).attending.load(Ordering::Relaxed) != 0
    }

    /// Tells peers which message a thread of this rank is about to sleep for. To be taken back before anything is read that might end the
    /// wait: whoever has seen that this rank has read all that was written to it sees that too.
    pub fn await_message(&self, awaited: Option<Awaited>) {
        self.words(self.rank).awaited.store(awaited.map_or(0, Awaited::word), Ordering::Relaxed);
    }

    /// Whether a thread of `rank` sleeps for this message.
    pub fn awaits(&self, rank: Rank, awaited: Awaited) -> bool {
        self.words(rank).awaited.load(Ordering::Relaxed) == awaited.word()
    }

    /// Tells peers that a thread of this rank begins to wait in a barrier of symmetric memory on the host.
    pub fn enter_barrier(&self) {
        self.words(self.rank).barriers.fetch_add(Barriers::WAITS, Ordering::Relaxed);
    }

    /// Tells peers that its wait is over: all have come, or not.
    pub fn leave_barrier(&self, met: bool) {
        let change = if met { Barriers::MET - Barriers::WAITS } else { Barriers::WAITS.wrapping_neg() };
        self.words(self.rank).barriers.fetch_add(change, Ordering::Relaxed);
    }

    /// Where `rank` stands among the barriers of symmetric memory on the host.
    pub fn barriers(&self, rank: Rank) -> Barriers {
        Barriers::of(self.words(rank).barriers.load(Ordering::Relaxed))
    }

    /// Tells peers that this rank has refused a call, after `calls` others. What it begins later is seen by nobody before this.
    pub fn note_refusal(&self, calls: u64) {
        let word = &self.words(self.rank).refusals;
        // One thread at a time makes or refuses calls of a group.
        word.store(Refusals::of(word.load(Ordering::Relaxed)).and_after(calls).word(), Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// What `rank` has refused since it made another call. To be asked after what it is doing.
    pub fn refusals(&self, rank: Rank) -> Refusals {
        fence(Ordering::Acquire);
        Refusals::of(self.words(rank).refusals.load(Ordering::Relaxed))
    }

    /// Process id of `rank`.
    pub fn pid(&self, rank: Rank) -> u32 {
        self.members[rank.index()].pid
    }

    /// Number of `rank` in the default group.
    pub fn global(&self, rank: Rank) -> u32 {
        self.members[rank.index()].global
    }

    /// Whether the group is the part of a larger one on one host.
    pub fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// Names the call of the larger group, such as "all_reduce(4 × float32, 16 bytes, SUM) #7 of group "g"", that collectives are for from
    /// now on: their errors name that.
    pub fn run_for(&self, asked: String) {
        *lock(&self.asked) = asked;
    }

    /// Name of the larger group's call that collectives are for, if this is a part of one.
    pub fn asked(&self) -> Option<String> {
        self.part.as_ref()?;
        Some(lock(&self.asked).clone()).filter(|asked| !asked.is_empty())
    }

    /// Number by which messages name `rank`.
    pub fn shown(&self, rank: Rank) -> Rank {
        self.part.as_ref().map_or(rank, |part| part.ranks[rank.index()])
    }

    /// Name of a rank, such as "rank 1 (pid 4711)", with the rank in the default group if that differs; of a part of a larger group
    /// "rank 3 (host "b", pid 4711)".
    pub fn describe(&self, rank: Rank) -> String {
        let Identity { pid, global } = self.members[rank.index()];
        if let Some(Part { host, .. }) = &self.part {
            return format!("rank {} (host {host:?}, pid {pid})", self.shown(rank));
        }
        if global == rank.0 { format!("rank {rank} (pid {pid})") } else { format!("rank {rank} (global rank {global}, pid {pid})") }
    }

    /// Makes everything that this member has published so far known to sleeping members.
    pub fn wake_sleepers(&self) {
        if self.header().sleepers.0.any() {
            self.ring_all();
        }
    }

    /// Makes everything that this member has published so far known to `peer`, should it sleep.
    pub fn wake(&self, peer: Rank) {
        if self.header().sleepers.0.any() {
            self.words(peer).bell.0.ring();
        }
    }

    /// Wakes everybody, oneself included.
    pub(super) fn ring_all(&self) {
        for rank in self.ranks() {
            self.words(rank).bell.0.ring();
        }
    }
}
