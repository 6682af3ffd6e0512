//! A member's view of the group's control block, and the words in which each member publishes its
//! state.
#![allow(unsafe_code, reason = "words at offsets of shared memory")]

use super::call_state::{AwaitedMessage, BarrierCount, CallProgress, CurrentCall, RejectionCount};
use super::spin_budget::{PATIENCE, now};
use crate::dtype::SumOrder;
use crate::lock::lock;
use crate::mem::layout::{HEADER_BYTES, MEMBER_BYTES, SegmentLayout};
use crate::mem::shm::ShmSegment;
use crate::op::Collective;
use crate::rank::Rank;
use crate::sync::doorbell::{Doorbell, Sleepers};
use crate::sync::failure::FirstFailure;
use crate::sync::shared_text::SharedText;
use crate::sys::cpu_affinity;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// Maximum number of spin iterations, some 40 ns each, while other processes contend for the cores
/// of this process; a peer that has a core answers within that time.
const SPINS_SHORT: u32 = 64;

/// The words that all members share.
#[repr(C, align(128))]
pub(super) struct SegmentHeader {
    pub(super) failure: FirstFailure,
    pub(super) sleepers: AlignedSleepers,
}

/// The count of sleepers on its own pair of cache lines, because a publisher reads it after every
/// flag.
#[repr(C, align(128))]
pub(super) struct AlignedSleepers(pub(super) Sleepers);

/// The words of one member. Only that member writes them, except for its bell.
#[repr(C, align(128))]
pub(super) struct MemberWords {
    stage: AtomicU64,
    pub(super) bell: AlignedBell,
    pub(super) departed: AtomicU32,
    phase: AtomicU32,
    capable: AtomicU32,
    probe: AtomicU64,
    /// The last collective started, see [`CurrentCall`]; initially 0.
    pub(super) doing: AtomicU64,
    /// The message for which a thread sleeps, see [`AwaitedMessage`]; otherwise 0.
    awaited: AtomicU64,
    /// The member's barriers of symmetric memory, see [`BarrierCount`].
    barriers: AtomicU64,
    /// When the last collectives of even and of odd number started.
    starts: [AtomicU64; 2],
    /// The calls that the member rejected last, see [`RejectionCount`].
    rejections: AtomicU64,
    attending: AtomicU32,
    /// The core on which the member last started a call, plus 1; 0 before the first call.
    pub(super) core: AtomicU32,
    call_site: AlignedText,
    /// The error with which the member left; valid once `departed` is set.
    pub(super) exit_reason: AlignedText,
}

#[repr(C, align(128))]
pub(super) struct AlignedBell(pub(super) Doorbell);

#[repr(C, align(128))]
pub(super) struct AlignedText(pub(super) SharedText);

const _: () =
    assert!(size_of::<SegmentHeader>() <= HEADER_BYTES && size_of::<MemberWords>() <= MEMBER_BYTES);

/// The identity of a member, as messages name it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Process id.
    pub pid: u32,
    /// Rank in the default group.
    pub global: u32,
}

/// The larger group, if this group is its part on one node. Messages name members by their ranks in
/// the larger group.
#[derive(Clone, Debug)]
pub struct ParentGroup {
    /// The name of the node.
    pub node: String,
    /// The ranks of the members in the larger group.
    pub ranks: Vec<Rank>,
    /// The ranks of all members of the larger group in the default group.
    pub global_ranks: Vec<u32>,
}

/// Describes the progress of a rank's calls that run in kernels.
pub type KernelProgress = fn(&ControlBlock, Rank) -> String;

/// A member's view of its group.
#[derive(Debug)]
pub struct ControlBlock {
    pub(super) segment: ShmSegment,
    pub(super) layout: SegmentLayout,
    pub(super) rank: Rank,
    pub(super) name: String,
    pub(super) members: Vec<Identity>,
    parent: Option<ParentGroup>,
    order: SumOrder,
    /// The larger group's call for which this member runs collectives; empty before the first.
    parent_call: Mutex<String>,
    pub(super) exited: Vec<OnceLock<String>>,
    /// When this member first saw that each member had left because of an error.
    pub(super) failed_at: Vec<OnceLock<Instant>>,
    /// The first member that this member has seen exit.
    pub(super) first_exited: OnceLock<Rank>,
    /// Describes the progress of calls that run in kernels. Set once kernels may wait for peers
    /// while no thread of this process waits; from then on, a member's exit fails the group at
    /// once.
    pub(super) kernel_progress: OnceLock<KernelProgress>,
    pub(super) spins: u32,
    /// How often this rank found a lower rank in need of the core on which this rank spins.
    pub(super) yields_to_peer: AtomicU32,
    /// Number of threads that wait in `wait_alone` and do not spin any more.
    pub(super) lone_waits: AtomicU32,
    /// True once the early warning of late ranks has been logged; one per group is enough.
    pub(super) warned: AtomicBool,
    /// True once the warning of different allocations has been logged.
    pub(super) warned_of_allocations: AtomicBool,
}

impl ControlBlock {
    /// Makes the view of `rank` in the group `name`; a waiting thread spins `spins` times before it
    /// yields its core.
    pub fn new(
        segment: ShmSegment,
        rank: Rank,
        name: String,
        members: Vec<Identity>,
        spins: u32,
    ) -> Self {
        let layout = SegmentLayout::new(members.len());
        let exited = members.iter().map(|_| OnceLock::new()).collect();
        let failed_at = members.iter().map(|_| OnceLock::new()).collect();
        Self {
            segment,
            layout,
            rank,
            name,
            members,
            parent: None,
            order: SumOrder::Rank,
            parent_call: Mutex::default(),
            exited,
            failed_at,
            first_exited: OnceLock::new(),
            kernel_progress: OnceLock::new(),
            spins,
            yields_to_peer: AtomicU32::new(0),
            lone_waits: AtomicU32::new(0),
            warned: AtomicBool::new(false),
            warned_of_allocations: AtomicBool::new(false),
        }
    }

    /// Makes messages name members by their ranks in the larger group, if this group is a part of
    /// one.
    pub fn named(self, part: Option<ParentGroup>) -> Self {
        Self { parent: part.filter(|part| part.ranks.len() == self.members.len()), ..self }
    }

    /// Sets the order in which reductions of the group combine the ranks' elements, the same on all
    /// members.
    pub fn summing(self, order: SumOrder) -> Self {
        Self { order, ..self }
    }

    /// Returns the order in which reductions of the group combine the ranks' elements.
    pub fn order(&self) -> SumOrder {
        self.order
    }

    /// Returns the rank of this member.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the ranks of the group.
    pub fn ranks(&self) -> impl DoubleEndedIterator<Item = Rank> + use<> {
        (0..self.members.len() as u32).map(Rank)
    }

    /// Returns the peers of this rank, starting with the next rank, so that not all peers read the
    /// same member first.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (me, n) = (self.rank.0, self.members.len() as u32);
        (1..n).map(move |step| Rank((me + step) % n))
    }

    /// Returns the number of spin iterations before a waiting thread yields its core.
    #[inline]
    pub fn spins(&self) -> u32 {
        if PATIENCE.is_short(now) { self.spins.min(SPINS_SHORT) } else { self.spins }
    }

    /// Returns the group's memory.
    pub fn segment(&self) -> &ShmSegment {
        &self.segment
    }

    /// Returns the layout of the shared memory.
    pub fn layout(&self) -> SegmentLayout {
        self.layout
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn header(&self) -> &SegmentHeader {
        // SAFETY: `SegmentHeader` consists of atomics, and offset 0 of every member's mapping holds
        // one.
        unsafe { self.segment.at(0) }
    }

    pub(super) fn words(&self, rank: Rank) -> &MemberWords {
        // SAFETY: MemberWords consists of atomics, and `layout.member` is the offset of one for
        // every rank.
        unsafe { self.segment.at(self.layout.member(rank)) }
    }

    /// Returns the number of stages of pipelined collectives that `rank` has finished; see
    /// `coll::cpu::pipeline`.
    pub fn stage(&self, rank: Rank) -> &AtomicU64 {
        &self.words(rank).stage
    }

    /// Returns the number of the last collective that `rank` has started.
    pub fn collective(&self, rank: Rank) -> u64 {
        self.current_call(rank).map_or(0, |doing| doing.number)
    }

    /// Returns the last collective that `rank` has started.
    pub fn current_call(&self, rank: Rank) -> Option<CurrentCall> {
        CurrentCall::of(self.words(rank).doing.load(Ordering::Relaxed))
    }

    /// Returns the message for which a thread of `rank` sleeps.
    pub(super) fn awaited_message(&self, rank: Rank) -> Option<AwaitedMessage> {
        AwaitedMessage::of(self.words(rank).awaited.load(Ordering::Relaxed))
    }

    /// Returns the phase of joining that `rank` has reached.
    pub fn phase(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).phase
    }

    /// Returns the word with the address of a known value in the private memory of `rank`. Peers
    /// read that value in order to test `process_vm_readv`.
    pub fn probe(&self, rank: Rank) -> &AtomicU64 {
        &self.words(rank).probe
    }

    /// Returns the word that is 1 if `rank` could read the memory of every peer.
    pub fn can_read_peers(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).capable
    }

    /// Publishes that this rank starts collective `number`, and on which core.
    pub fn begin(&self, number: u64, op: Collective) {
        self.set_current_call(CurrentCall { number, op, progress: CallProgress::Running });
        self.note_core();
    }

    /// Returns the word with the time at which `rank` started collective `number`, in nanoseconds
    /// of the node's monotonic clock, which the rank writes before it posts its call. Two words
    /// suffice: no rank starts collective `number` + 2 before every rank has started `number` + 1.
    pub fn start(&self, rank: Rank, number: u64) -> &AtomicU64 {
        &self.words(rank).starts[(number % 2) as usize]
    }

    /// Publishes that this rank has finished its part of collective `number`.
    pub fn finish(&self, number: u64, op: Collective) {
        self.set_current_call(CurrentCall { number, op, progress: CallProgress::Finished });
    }

    /// Publishes whether this rank waits for other nodes, if this group is the part of a larger
    /// group on this node. The rank's last collective must be finished.
    pub fn set_waits_for_nodes(&self, waits: bool) {
        let progress = if waits { CallProgress::WaitsForNodes } else { CallProgress::Finished };
        // A node with one rank has run no collective.
        if let Some(call) = self.current_call(self.rank) {
            self.set_current_call(CurrentCall { progress, ..call });
        }
    }

    pub(super) fn set_current_call(&self, call: CurrentCall) {
        self.words(self.rank).doing.store(call.word(), Ordering::Relaxed);
    }

    /// Returns the call site of the last call that `rank` has posted, if it publishes call sites,
    /// or the operator whose calls that call compares. The text is written before the post, and
    /// not again before every member has seen that the calls agree.
    pub fn call_site(&self, rank: Rank) -> &SharedText {
        &self.words(rank).call_site.0
    }

    fn note_core(&self) {
        self.words(self.rank).core.store(cpu_affinity::current() as u32 + 1, Ordering::Relaxed);
    }

    /// Publishes whether a thread of this rank is driving the progress of messages.
    pub fn set_progressing(&self, attending: bool) {
        self.note_core();
        self.words(self.rank).attending.store(attending.into(), Ordering::Relaxed);
    }

    /// Returns true if a thread of `rank` is driving the progress of messages. A hint: it may be
    /// outdated.
    pub fn is_progressing(&self, rank: Rank) -> bool {
        self.words(rank).attending.load(Ordering::Relaxed) != 0
    }

    /// Publishes the message for which a thread of this rank is about to sleep. Must be withdrawn
    /// before the thread reads anything that may end the wait, so that a peer that sees its data
    /// consumed also sees the withdrawal.
    pub fn await_message(&self, awaited: Option<AwaitedMessage>) {
        self.words(self.rank)
            .awaited
            .store(awaited.map_or(0, AwaitedMessage::word), Ordering::Relaxed);
    }

    /// Returns true if a thread of `rank` sleeps for this message.
    pub fn awaits(&self, rank: Rank, awaited: AwaitedMessage) -> bool {
        self.words(rank).awaited.load(Ordering::Relaxed) == awaited.word()
    }

    /// Publishes that a thread of this rank starts to wait in a host-side barrier of symmetric
    /// memory.
    pub fn enter_barrier(&self) {
        self.words(self.rank).barriers.fetch_add(BarrierCount::WAITS, Ordering::Relaxed);
    }

    /// Publishes that the wait in a barrier is over; `met` is true if all members arrived.
    pub fn leave_barrier(&self, met: bool) {
        let change = if met {
            BarrierCount::MET - BarrierCount::WAITS
        } else {
            BarrierCount::WAITS.wrapping_neg()
        };
        self.words(self.rank).barriers.fetch_add(change, Ordering::Relaxed);
    }

    /// Returns the state of `rank` in the host-side barriers of symmetric memory.
    pub fn barriers(&self, rank: Rank) -> BarrierCount {
        BarrierCount::of(self.words(rank).barriers.load(Ordering::Relaxed))
    }

    /// Publishes that this rank has rejected a call, after `calls` others. Peers see this before
    /// anything that the rank starts later.
    pub fn note_rejection(&self, calls: u64) {
        let word = &self.words(self.rank).rejections;
        // Only one thread at a time makes or rejects calls of a group.
        word.store(
            RejectionCount::of(word.load(Ordering::Relaxed)).and_after(calls).word(),
            Ordering::Relaxed,
        );
        fence(Ordering::Release);
    }

    /// Returns the calls that `rank` has rejected since its last valid call. Must be read after
    /// `doing`.
    pub fn rejections(&self, rank: Rank) -> RejectionCount {
        fence(Ordering::Acquire);
        RejectionCount::of(self.words(rank).rejections.load(Ordering::Relaxed))
    }

    /// Returns the process id of `rank`.
    pub fn pid(&self, rank: Rank) -> u32 {
        self.members[rank.index()].pid
    }

    /// Returns the rank of `rank` in the default group.
    pub fn global(&self, rank: Rank) -> u32 {
        self.members[rank.index()].global
    }

    /// Returns the ranks in the default group of all members of this group, or of the larger group
    /// to which it belongs.
    pub fn global_ranks(&self) -> Vec<u32> {
        let own = || self.members.iter().map(|member| member.global).collect();
        self.parent.as_ref().map_or_else(own, |part| part.global_ranks.clone())
    }

    /// Returns true if the group is the part of a larger group on this node.
    pub fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// Sets the larger group's call that the next collectives belong to, such as "all_reduce(4 ×
    /// float32, 16 bytes, SUM) #7 of group "g"". Errors of the collectives name it.
    pub fn set_parent_call(&self, asked: String) {
        *lock(&self.parent_call) = asked;
    }

    /// Returns the larger group's call for which collectives run, if this group is a part of one.
    pub fn parent_call(&self) -> Option<String> {
        self.parent.as_ref()?;
        Some(lock(&self.parent_call).clone()).filter(|asked| !asked.is_empty())
    }

    /// Returns the rank by which messages name `rank`.
    pub fn display_rank(&self, rank: Rank) -> Rank {
        self.parent.as_ref().map_or(rank, |part| part.ranks[rank.index()])
    }

    /// Returns the name of a rank, such as "rank 1 (pid 4711)", with its rank in the default group
    /// if that differs; in a part of a larger group, "rank 3 (node "b", pid 4711)".
    pub fn describe(&self, rank: Rank) -> String {
        let Identity { pid, global } = self.members[rank.index()];
        if let Some(ParentGroup { node: host, .. }) = &self.parent {
            return format!("rank {} (node {host:?}, pid {pid})", self.display_rank(rank));
        }
        if global == rank.0 {
            format!("rank {rank} (pid {pid})")
        } else {
            format!("rank {rank} (global rank {global}, pid {pid})")
        }
    }

    /// Wakes sleeping members, so that they see everything that this member has published.
    pub fn wake_sleepers(&self) {
        if self.header().sleepers.0.any() {
            self.ring_all();
        }
    }

    /// Wakes `peer` if it sleeps, so that it sees everything that this member has published.
    pub fn wake(&self, peer: Rank) {
        if self.header().sleepers.0.any() {
            self.words(peer).bell.0.ring();
        }
    }

    /// Wakes every member, including this one.
    pub(super) fn ring_all(&self) {
        for rank in self.ranks() {
            self.words(rank).bell.0.ring();
        }
    }
}
