//! Waiting for peers: never without a limit, and never past a failure or a peer's exit.

use super::block::ControlBlock;
use super::spin_budget::{PATIENCE, now, yield_core};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::sync::final_check::lost;
use crate::sync::timeout::CallTimeout;
use crate::sys::cpu_affinity;
use crate::sys::interrupt::Interrupts;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The purpose of a wait, which decides how the wait fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitPurpose {
    /// The thread waits for data of the missing peers; a timeout fails the group.
    Missing,
    /// The thread waits for data of the missing peers; a timeout fails only this call.
    Alone,
    /// The thread waits until all ranks can continue together.
    Together,
}

/// Number of spin iterations between two checks of the clock, the failure record and exited
/// members.
const CHECK_TURNS: u32 = 64;
/// Number of spin iterations after which a waiting thread checks whether a missing peer needs the
/// core on which it spins.
const CORE_CHECK_TURNS: u32 = 16;
/// A rank that spins on a core which a peer needs tries to move away once in this many cases.
const MIGRATE_EVERY: u32 = 8;
/// How long a rank that leaves waits for its other threads to notice, which sleep 50 ms at most.
const LONE_WAIT_END: Duration = Duration::from_millis(200);
/// Number of yields before a waiting thread sleeps: some 100 µs on an uncontended core, twice the
/// cost of sleeping and waking. If another thread wants the core, it often belongs to the very rank
/// for which this thread waits.
pub const YIELD_TURNS: u32 = 200;

/// A thread in `wait_alone` that does not spin any more, as one of a count of such threads.
struct LoneWait<'a>(&'a AtomicU32);

impl<'a> LoneWait<'a> {
    fn new(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for LoneWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ControlBlock {
    /// Returns true if one of `peers` needs the core on which this thread runs, so that spinning
    /// would keep that peer from running. The system puts waking threads on one core even if others
    /// are free, and takes tens of milliseconds to separate them; therefore the higher rank moves
    /// away.
    #[cold]
    pub fn in_the_way(&self, mut peers: impl Iterator<Item = Rank>) -> bool {
        let here = cpu_affinity::current();
        let Some(peer) = peers.find(|&peer| self.core(peer) == here) else { return false };
        let due =
            || self.yields_to_peer.fetch_add(1, Ordering::Relaxed).is_multiple_of(MIGRATE_EVERY);
        !(peer < self.rank
            && due()
            && cpu_affinity::leave(|core| self.peers().any(|peer| self.core(peer) == core)))
    }

    fn core(&self, rank: Rank) -> usize {
        (self.words(rank).core.load(Ordering::Relaxed) as usize).wrapping_sub(1)
    }

    /// Returns once no peer is `missing`. Everything that a peer published before it stopped being
    /// missing is visible then.
    ///
    /// Fails, and fails the group, if a missing peer has exited or left, if the group has failed,
    /// or at the limit. `about` names the call.
    #[inline]
    pub fn wait_for_peers(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: impl Fn(Rank) -> bool,
    ) -> Result<()> {
        self.wait(limit, about, missing, WaitPurpose::Missing)
    }

    /// Waits like `wait_for_peers`, for a point that no rank passes before all ranks have reached
    /// it. The exit of any rank, missing or not, fails the wait at once, however long the missing
    /// ranks take.
    #[inline]
    pub fn wait_together(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: impl Fn(Rank) -> bool,
    ) -> Result<()> {
        self.wait(limit, about, missing, WaitPurpose::Together)
    }

    /// Waits like `wait_for_peers`, but a timeout fails only this call and not the group. If this
    /// rank leaves the group meanwhile, the wait fails with `Aborted`.
    pub fn wait_alone(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: impl Fn(Rank) -> bool,
    ) -> Result<()> {
        self.wait(limit, about, missing, WaitPurpose::Alone)
    }

    /// Returns once every thread in `wait_alone` has noticed that this rank has left the group, but
    /// after [`LONE_WAIT_END`] at the latest.
    pub fn end_lone_waits(&self) {
        let give_up = Instant::now() + LONE_WAIT_END;
        while self.lone_waits.load(Ordering::SeqCst) != 0 && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The error of a call on a group that this rank has left.
    pub fn destroyed(&self) -> Error {
        Error::aborted(format!("group \"{}\" was destroyed", self.name()))
    }

    #[inline]
    fn wait(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: impl Fn(Rank) -> bool,
        purpose: WaitPurpose,
    ) -> Result<()> {
        let most = self.spins();
        for peer in self.peers() {
            let mut spins = 0;
            while missing(peer) {
                spins += 1;
                let hopeless = spins == CORE_CHECK_TURNS
                    && self.in_the_way(self.peers().filter(|&peer| missing(peer)));
                if hopeless
                    || spins > most
                    || (spins % CHECK_TURNS == 0 && self.header().failure.stands())
                {
                    return self.wait_slowly(limit, about, &missing, purpose);
                }
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    #[cold]
    fn wait_slowly(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: &dyn Fn(Rank) -> bool,
        purpose: WaitPurpose,
    ) -> Result<()> {
        let first_missing = || self.peers().any(missing);
        let _lone = (purpose == WaitPurpose::Alone).then(|| LoneWait::new(&self.lone_waits));
        let (mut turns, mut interrupts) = (0, None::<Interrupts>);
        while first_missing() {
            // A failure of the group says more.
            if purpose == WaitPurpose::Alone
                && self.departure(self.rank).is_some()
                && self.failure().is_none()
            {
                return Err(self.destroyed());
            }
            let trouble = self.trouble(limit, about, missing);
            match trouble.or_else(|| {
                if purpose == WaitPurpose::Together {
                    self.death(limit, about, missing)
                } else {
                    None
                }
            }) {
                Some(error)
                    if purpose == WaitPurpose::Alone
                        && error.kind == ErrorKind::Timeout
                        && self.failure().is_none() =>
                {
                    return Err(error);
                }
                Some(error) => return Err(self.fail(error)),
                None => {}
            }
            self.warn_once(limit, about, &|| self.late_ranks(missing));
            turns += 1;
            if turns <= YIELD_TURNS && !PATIENCE.is_short(now) {
                yield_core();
            } else {
                interrupts
                    .get_or_insert_default()
                    .check()
                    .map_err(|_| self.interrupted(&about()))?;
                self.sleep(limit.remaining().unwrap_or(Duration::ZERO), || {
                    !first_missing() || self.header().failure.stands()
                });
            }
        }
        Ok(())
    }

    /// Returns true the first time that it is called, because one early warning of late ranks in
    /// the life of the group is enough.
    pub fn is_first_warning(&self) -> bool {
        !self.warned.swap(true, Ordering::Relaxed)
    }

    /// Returns true the first time that it is called, because one warning that ranks bring
    /// different allocations to a rendezvous is enough.
    pub fn is_first_allocation_warning(&self) -> bool {
        !self.warned_of_allocations.swap(true, Ordering::Relaxed)
    }

    /// Logs, once in the life of the group, that this rank has waited for long in `about` for
    /// `late`.
    pub fn warn_once(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        late: &dyn Fn() -> String,
    ) {
        if limit.should_warn() && self.is_first_warning() {
            let (me, seconds) = (self.describe(self.rank), limit.elapsed().as_secs_f32());
            log::warn!("{me} has waited {seconds:.1} s in {} for {}", about(), late());
        }
    }

    /// Fails the group because a signal handler has raised on this thread while it waited in
    /// `about`.
    pub fn interrupted(&self, about: &str) -> Error {
        self.fail(Error::aborted(format!(
            "{} was interrupted by a signal in {about}",
            self.describe(self.rank)
        )))
    }

    /// Sleeps until a peer publishes something, for at most 50 ms or `limit`, unless `ready`
    /// returns true.
    pub fn sleep(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.words(self.rank).bell.0.sleep(&self.header().sleepers.0, limit, ready);
    }

    /// Fails the group if the `missing` members can no longer arrive.
    pub fn check(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: &dyn Fn(Rank) -> bool,
    ) -> Result<()> {
        self.trouble(limit, about, missing).map_or(Ok(()), |error| Err(self.fail(error)))
    }

    /// Checks the group for a call that continues without a wait: fails if the group has failed,
    /// and fails the group at the limit.
    pub fn look(&self, limit: &CallTimeout, about: &dyn Fn() -> String) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if limit.remaining().is_some() {
            return Ok(());
        }
        let (me, seconds) = (self.describe(self.rank), limit.elapsed().as_secs_f32());
        Err(self.fail(Error::timeout(format!(
            "{me} reached its timeout after {seconds:.1} s in {}; no rank was late",
            about()
        ))))
    }

    /// Returns the error that prevents the `missing` members from arriving, if there is one.
    pub(super) fn trouble(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: &dyn Fn(Rank) -> bool,
    ) -> Option<Error> {
        let any_missing = || self.peers().any(missing);
        if let Some(failure) = lost(any_missing, || self.failure()) {
            return Some(failure);
        }
        let seconds = || limit.elapsed().as_secs_f32();
        let me = || self.describe(self.rank);
        let last = limit.remaining().is_none();
        let reason = |peer| self.exit_reason_of_awaited(peer, last);
        let absent = |peer| lost(|| missing(peer), || reason(peer)).map(|how| (peer, how));
        // The first exit is reported first, because the launcher may have ended other ranks since.
        if let Some((peer, how)) =
            self.first_exited.get().copied().into_iter().chain(self.peers()).find_map(absent)
        {
            let text = format!(
                "{} {how}; {} had waited {:.1} s for it in {}",
                self.describe(peer),
                me(),
                seconds(),
                about()
            );
            return Some(Error::peer(text));
        }
        let expired = || {
            limit.remaining().is_none().then(|| {
                let text = format!(
                    "{} reached its timeout after {:.1} s in {}, waiting for {}",
                    me(),
                    seconds(),
                    about(),
                    self.late_ranks(missing)
                );
                Error::timeout(text)
            })
        };
        lost(any_missing, expired)
    }

    /// Returns the error that names a member that has exited while others are still missing.
    fn death(
        &self,
        limit: &CallTimeout,
        about: &dyn Fn() -> String,
        missing: &dyn Fn(Rank) -> bool,
    ) -> Option<Error> {
        let (peer, how) = self.dead_rank()?;
        // Checked again after the exit is seen; otherwise this could miss that the last missing
        // rank arrived before the exit.
        self.peers().any(missing).then(|| {
            let (seconds, late) = (limit.elapsed().as_secs_f32(), self.late_ranks(missing));
            let (peer, me) = (self.describe(peer), self.describe(self.rank));
            Error::peer(format!(
                "{peer} {how}; {me} had waited {seconds:.1} s with it for {late} in {}",
                about()
            ))
        })
    }
}
