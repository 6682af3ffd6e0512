//! A member's view of the group's control block: who is there, who waits, what failed.

mod call_state;

use crate::error::{Error, Kind, Result};
use crate::mem::layout::{HEADER_BYTES, Layout, MEMBER_BYTES};
use crate::mem::shm::Segment;
use crate::op::Op;
use crate::rank::{Rank, name_ranks};
use crate::sync::call_site::CallSiteText;
use crate::sync::doorbell::{Doorbell, Sleepers};
use crate::sync::failure::FirstFailure;
use crate::sync::last_look::lost;
use crate::sync::limit::Limit;
use crate::sys::{core, process};
pub use call_state::{Awaited, Doing};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Shared by all members.
#[repr(C, align(128))]
struct Header {
    failure: FirstFailure,
    sleepers: AlignedSleepers,
}

/// On its own pair of lines: a publisher reads it after every flag.
#[repr(C, align(128))]
struct AlignedSleepers(Sleepers);

/// One member's own words: written by it alone, except for its bell.
#[repr(C, align(128))]
struct MemberWords {
    stage: AtomicU64,
    bell: AlignedBell,
    departed: AtomicU32,
    phase: AtomicU32,
    capable: AtomicU32,
    probe: AtomicU64,
    /// The last collective begun, see [`Doing`]; 0: none.
    doing: AtomicU64,
    /// The message that a thread sleeps for, see [`Awaited`]; 0: none.
    awaited: AtomicU64,
    attending: AtomicU32,
    /// 1 + the core where it last began something; 0: nothing begun yet.
    core: AtomicU32,
    call_site: AlignedCallSite,
}

#[repr(C, align(128))]
struct AlignedBell(Doorbell);

#[repr(C, align(128))]
struct AlignedCallSite(CallSiteText);

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES && size_of::<MemberWords>() <= MEMBER_BYTES);

/// What a message says about a member.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Process id.
    pub pid: u32,
    /// Rank in the default group.
    pub global: u32,
}

/// How far the calls of a rank have come that kernels make, in words.
pub type Progress = fn(&ControlBlock, Rank) -> String;

/// A member's view of its group.
#[derive(Debug)]
pub struct ControlBlock {
    segment: Segment,
    layout: Layout,
    rank: Rank,
    name: String,
    members: Vec<Identity>,
    gone: Vec<OnceLock<String>>,
    any_gone: AtomicBool,
    /// Set once kernels wait for peers without looking at this process: whoever dies fails the group at once. Says how far a rank's have come.
    unattended: OnceLock<Progress>,
    spins: u32,
    /// How often this rank found itself in a peer's way.
    crowded: AtomicU32,
    /// The early warning was given: one of a group is enough to look at the job.
    warned: AtomicBool,
}

/// What a wait is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Something of the missing; a late one fails the group.
    Missing,
    /// Something of the missing; a late one fails this call alone.
    Alone,
    /// All ranks, who can go on only together.
    Together,
}

/// Looks at the clock, the failure record and dead members once in so many turns.
const CHECK_EVERY: u32 = 64;
/// Turns after which a waiting thread asks whether whom it waits for needs the very core it spins on.
const LOOK_AROUND: u32 = 16;
/// A rank in the way of a peer tries once in so many times to move away.
const PART_EVERY: u32 = 8;
/// Turns of giving the core away before going to sleep: some 100 µs where nobody else wants it, twice what sleeping and waking cost. Where
/// somebody does want it, it is often the very rank that is waited for.
pub const YIELDS: u32 = 200;

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
            gone,
            any_gone: AtomicBool::new(false),
            unattended: OnceLock::new(),
            spins,
            crowded: AtomicU32::new(0),
            warned: AtomicBool::new(false),
        }
    }

    /// This member.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Everybody.
    pub fn ranks(&self) -> impl DoubleEndedIterator<Item = Rank> + use<> {
        (0..self.members.len() as u32).map(Rank)
    }

    /// Everybody else, starting with the next rank: peers do not all look at the same member first.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (me, n) = (self.rank.0, self.members.len() as u32);
        (1..n).map(move |step| Rank((me + step) % n))
    }

    /// Turns of spinning before a waiting thread gives its core away.
    pub fn spins(&self) -> u32 {
        self.spins
    }

    /// The group's memory.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Where things lie in it.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn header(&self) -> &Header {
        // SAFETY: Header consists of atomics, and every member's offset 0 holds a Header.
        unsafe { self.segment.at(0) }
    }

    fn words(&self, rank: Rank) -> &MemberWords {
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

    /// Which phase of joining `rank` has reached.
    pub fn phase(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).phase
    }

    /// Address of a word in the private memory of `rank` that holds its own address, for trying `process_vm_readv`.
    pub fn probe(&self, rank: Rank) -> &AtomicU64 {
        &self.words(rank).probe
    }

    /// 1 if `rank` could read the memory of every peer.
    pub fn capable(&self, rank: Rank) -> &AtomicU32 {
        &self.words(rank).capable
    }

    /// Tells peers that this rank begins collective `number`, and on which core.
    pub fn begin(&self, number: u64, op: Op) {
        self.words(self.rank).doing.store(Doing { number, op, finished: false }.word(), Ordering::Relaxed);
        self.note_core();
    }

    /// Tells peers that this rank has finished its part of that collective.
    pub fn finish(&self, number: u64, op: Op) {
        self.words(self.rank).doing.store(Doing { number, op, finished: true }.word(), Ordering::Relaxed);
    }

    /// Where the call stands that `rank` has posted last, if it says so. Written before the post, and not again before everybody has seen that
    /// the calls agree.
    pub fn call_site(&self, rank: Rank) -> &CallSiteText {
        &self.words(rank).call_site.0
    }

    fn note_core(&self) {
        self.words(self.rank).core.store(core::current() as u32 + 1, Ordering::Relaxed);
    }

    /// Whether one of `peers` needs the core that this thread runs on, so that spinning would keep it from running. The system puts waking
    /// threads on one core even where others are free, and takes tens of milliseconds to part them: the higher rank moves away.
    #[cold]
    pub fn in_the_way(&self, mut peers: impl Iterator<Item = Rank>) -> bool {
        let here = core::current();
        let Some(peer) = peers.find(|&peer| self.core(peer) == here) else { return false };
        let due = || self.crowded.fetch_add(1, Ordering::Relaxed).is_multiple_of(PART_EVERY);
        !(peer < self.rank && due() && core::leave(|core| self.peers().any(|peer| self.core(peer) == core)))
    }

    fn core(&self, rank: Rank) -> usize {
        (self.words(rank).core.load(Ordering::Relaxed) as usize).wrapping_sub(1)
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

    /// Tells peers which message a thread of this rank is about to sleep for. To be taken back before anything is read that might end the wait:
    /// whoever has seen that this rank has read all that was written to it sees that too.
    pub fn await_message(&self, awaited: Option<Awaited>) {
        self.words(self.rank).awaited.store(awaited.map_or(0, Awaited::word), Ordering::Relaxed);
    }

    /// Whether a thread of `rank` sleeps for this message.
    pub fn awaits(&self, rank: Rank, awaited: Awaited) -> bool {
        self.words(rank).awaited.load(Ordering::Relaxed) == awaited.word()
    }

    /// Process id of `rank`.
    pub fn pid(&self, rank: Rank) -> u32 {
        self.members[rank.index()].pid
    }

    /// What `rank` is in the default group.
    pub fn global(&self, rank: Rank) -> u32 {
        self.members[rank.index()].global
    }

    /// "rank 1 (pid 4711)", with the rank in the default group where that differs.
    pub fn describe(&self, rank: Rank) -> String {
        let Identity { pid, global } = self.members[rank.index()];
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
    fn ring_all(&self) {
        for rank in self.ranks() {
            self.words(rank).bell.0.ring();
        }
    }

    /// Records the group's first failure and wakes everybody; returns the failure that stands.
    pub fn fail(&self, error: Error) -> Error {
        self.header().failure.record(self.rank, &error);
        self.ring_all();
        self.failure().unwrap_or(error)
    }

    /// Runs `body`. A panic in it fails the group on all ranks: see `panicked`.
    pub fn contain<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(self.panicked(&*panic)))
    }

    /// Fails the group because of a panic of this rank: nobody knows what it left half done, and peers may wait for the rest.
    pub fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Error {
        let doing = self.doing(self.rank).map_or_else(String::new, |doing| format!(", {doing}"));
        let who = format!("{} of group \"{}\"{doing}", self.describe(self.rank), self.name());
        self.fail(Error::panicked(&who, panic))
    }

    /// The first failure of the group.
    pub fn failure(&self) -> Option<Error> {
        let failure = &self.header().failure;
        if failure.stands() { failure.read(self.rank) } else { None }
    }

    /// Notes that the process of `rank` has ended, and wakes this member.
    pub fn note_gone(&self, rank: Rank, how: String) {
        let _ = self.gone[rank.index()].set(how);
        self.any_gone.store(true, Ordering::Release);
        self.words(self.rank).bell.0.ring();
        self.fail_if_unattended();
    }

    /// From now on a member's death fails the group even if no call waits for it here: kernels may. `progress` is for the message.
    pub fn wait_unattended(&self, progress: Progress) {
        // Who was first has said the same.
        let _ = self.unattended.set(progress);
        self.fail_if_unattended();
    }

    fn fail_if_unattended(&self) {
        if let Some(progress) = self.unattended.get()
            && let Some(((rank, _), dead)) = self.dead_rank().zip(self.dead())
        {
            let (theirs, me, own) = (progress(self, rank), self.describe(self.rank), progress(self, self.rank));
            self.fail(Error::peer(format!("{}, {theirs}; {me} is alive, {own}", dead.message)));
        }
    }

    /// Tells everybody that this member takes part in nothing further.
    pub fn depart(&self) {
        self.words(self.rank).departed.store(1, Ordering::Release);
        self.ring_all();
    }

    /// How `rank` became unable to take part, if it did.
    pub fn absence(&self, rank: Rank) -> Option<String> {
        let departed = self.words(rank).departed.load(Ordering::Acquire) != 0;
        let gone = if self.any_gone.load(Ordering::Acquire) { self.gone[rank.index()].get() } else { None };
        match (departed, gone) {
            (true, _) => Some("left the group (destroy_process_group or exit)".into()),
            (false, Some(how)) => Some(how.clone()),
            (false, None) => None,
        }
    }

    /// Whether the process of a member is known to have ended.
    pub fn any_ended(&self) -> bool {
        self.any_gone.load(Ordering::Acquire)
    }

    /// How the process of `rank` has ended, if it is known to; it may have left the group before.
    pub fn ended(&self, rank: Rank) -> Option<&String> {
        self.gone[rank.index()].get()
    }

    /// That a member's process has ended without leaving the group.
    pub fn dead(&self) -> Option<Error> {
        let (rank, how) = self.dead_rank()?;
        Some(Error::peer(format!("{} of group \"{}\" {how}", self.describe(rank), self.name)))
    }

    /// The first member whose process ended without leaving the group, and how it ended.
    pub fn dead_rank(&self) -> Option<(Rank, &String)> {
        if !self.any_gone.load(Ordering::Acquire) {
            return None;
        }
        let died = |rank: Rank| self.gone[rank.index()].get().filter(|_| self.words(rank).departed.load(Ordering::Acquire) == 0);
        self.ranks().find_map(|rank| Some((rank, died(rank)?)))
    }

    /// Returns once no peer is `missing`. What a peer published before it stopped being missing is visible then.
    ///
    /// Fails, and fails the group, when a missing peer has died or left, when the group has failed, or at the limit. `about` names the call.
    #[inline]
    pub fn wait_for_peers(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Missing)
    }

    /// As `wait_for_peers`, for what no rank passes before all have come to it: whoever has died, missing or not, has died in it, and
    /// fails it at once, however long those who are missing take.
    #[inline]
    pub fn wait_together(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Together)
    }

    /// As `wait_for_peers`, but the limit fails this call alone: the group goes on.
    pub fn wait_alone(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Alone)
    }

    #[inline]
    fn wait(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool, purpose: Wait) -> Result<()> {
        for peer in self.peers() {
            let mut spins = 0;
            while missing(peer) {
                spins += 1;
                let hopeless = spins == LOOK_AROUND && self.in_the_way(self.peers().filter(|&peer| missing(peer)));
                if hopeless || spins > self.spins || (spins % CHECK_EVERY == 0 && self.header().failure.stands()) {
                    return self.wait_slowly(limit, about, &missing, purpose);
                }
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    #[cold]
    fn wait_slowly(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool, purpose: Wait) -> Result<()> {
        let first_missing = || self.peers().any(missing);
        let mut turns = 0;
        while first_missing() {
            let trouble = self.trouble(limit, about, missing);
            match trouble.or_else(|| if purpose == Wait::Together { self.death(limit, about, missing) } else { None }) {
                Some(error) if purpose == Wait::Alone && error.kind == Kind::Timeout && self.failure().is_none() => return Err(error),
                Some(error) => return Err(self.fail(error)),
                None => {}
            }
            if limit.warning_due() && !self.warned.swap(true, Ordering::Relaxed) {
                let (late, seconds) = (self.late(missing), limit.waited().as_secs_f32());
                log::warn!("{} has waited {seconds:.1} s in {} for {late}", self.describe(self.rank), about());
            }
            turns += 1;
            if turns <= YIELDS {
                std::thread::yield_now();
            } else {
                self.sleep(limit.left().unwrap_or(Duration::ZERO), || !first_missing() || self.header().failure.stands());
            }
        }
        Ok(())
    }

    /// Sleeps until a peer publishes something, a slice of time or `limit` at most, unless `ready` holds.
    pub fn sleep(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.words(self.rank).bell.0.sleep(&self.header().sleepers.0, limit, ready);
    }

    /// Fails the group if waiting for the `missing` members is pointless.
    pub fn check(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Result<()> {
        self.trouble(limit, about, missing).map_or(Ok(()), |error| Err(self.fail(error)))
    }

    /// For a call that goes on without a wait: fails once the group has, and fails the group at the limit.
    pub fn look(&self, limit: &Limit, about: &dyn Fn() -> String) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if limit.left().is_some() {
            return Ok(());
        }
        let (me, seconds) = (self.describe(self.rank), limit.waited().as_secs_f32());
        Err(self.fail(Error::timeout(format!("{me} was {seconds:.1} s until its timeout in {}; no rank was late", about()))))
    }

    /// Why waiting for the `missing` members is pointless, if it is.
    fn trouble(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Option<Error> {
        let any_missing = || self.peers().any(missing);
        if let Some(failure) = lost(any_missing, || self.failure()) {
            return Some(failure);
        }
        let seconds = || limit.waited().as_secs_f32();
        let me = || self.describe(self.rank);
        let absent = |peer| lost(|| missing(peer), || self.absence(peer)).map(|how| (peer, how));
        if let Some((peer, how)) = self.peers().find_map(absent) {
            let text = format!("{} {how}; {} had waited {:.1} s for it in {}", self.describe(peer), me(), seconds(), about());
            return Some(Error::peer(text));
        }
        let expired = || {
            limit.left().is_none().then(|| {
                let text = format!("{} waited {:.1} s until its timeout in {} for {}", me(), seconds(), about(), self.late(missing));
                Error::timeout(text)
            })
        };
        lost(any_missing, expired)
    }

    /// "rank 1: pid 4711 alive, asleep"
    pub fn process_state(&self, rank: Rank) -> String {
        let pid = self.pid(rank);
        format!("rank {rank}: pid {pid} {}", process::state(pid).unwrap_or("exited"))
    }

    /// Who has died in a wait that some are still missing from.
    fn death(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Option<Error> {
        let (peer, how) = self.dead_rank()?;
        // Asked again after the death was seen: else that rank may have come through before it died.
        self.peers().any(missing).then(|| {
            let (seconds, late) = (limit.waited().as_secs_f32(), self.late(missing));
            let (peer, me) = (self.describe(peer), self.describe(self.rank));
            Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s with it for {late} in {}", about()))
        })
    }

    /// The missing members, each with what its process is doing.
    pub fn late(&self, missing: &dyn Fn(Rank) -> bool) -> String {
        let late: Vec<Rank> = self.ranks().filter(|&rank| rank != self.rank && missing(rank)).collect();
        let state = |rank: &Rank| {
            let doing = self.doing(*rank).map_or_else(|| "has begun no collective".into(), |doing| doing.to_string());
            format!("{}, {doing}", self.process_state(*rank))
        };
        let states: Vec<String> = late.iter().map(state).collect();
        format!("{} ({})", name_ranks(&late), states.join("; "))
    }
}

#[cfg(test)]
pub(crate) mod tests;
