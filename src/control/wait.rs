//! Waiting for peers: never without a limit, never past a failure or a death.

use super::block::ControlBlock;
use super::patience::{PATIENCE, now, yield_core};
use crate::error::{Error, Kind, Result};
use crate::rank::Rank;
use crate::sync::last_look::lost;
use crate::sync::limit::Limit;
use crate::sys::core;
use crate::sys::interrupt::Interrupts;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Purpose of a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Something of the missing; a late one fails the group.
    Missing,
    /// Something of the missing; a late one fails this call alone.
    Alone,
    /// Wait of all ranks, who can go on only together.
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

    /// Returns once no peer is `missing`. What a peer published before it stopped being missing is visible then.
    ///
    /// Fails, and fails the group, when a missing peer has died or left, when the group has failed, or at the limit. `about` names the
    /// call.
    #[inline]
    pub fn wait_for_peers(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Missing)
    }

    /// Waits as `wait_for_peers` does, for what no rank passes before all have come to it. Whoever has died, missing or not, has died in
    /// it, and fails it at once, however long those who are missing take.
    #[inline]
    pub fn wait_together(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Together)
    }

    /// Waits as `wait_for_peers` does, but the limit fails this call alone: the group goes on.
    pub fn wait_alone(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool) -> Result<()> {
        self.wait(limit, about, missing, Wait::Alone)
    }

    #[inline]
    fn wait(&self, limit: &Limit, about: &dyn Fn() -> String, missing: impl Fn(Rank) -> bool, purpose: Wait) -> Result<()> {
        let most = self.spins();
        for peer in self.peers() {
            let mut spins = 0;
            while missing(peer) {
                spins += 1;
                let hopeless = spins == LOOK_AROUND && self.in_the_way(self.peers().filter(|&peer| missing(peer)));
                if hopeless || spins > most || (spins % CHECK_EVERY == 0 && self.header().failure.stands()) {
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
        let (mut turns, mut interrupts) = (0, None::<Interrupts>);
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
            if turns <= YIELDS && !PATIENCE.is_short(now) {
                yield_core();
            } else {
                interrupts.get_or_insert_default().check().map_err(|_| self.interrupted(&about()))?;
                self.sleep(limit.left().unwrap_or(Duration::ZERO), || !first_missing() || self.header().failure.stands());
            }
        }
        Ok(())
    }

    /// Fails the group because a signal's handler has raised on this thread while it waited in `about`.
    pub fn interrupted(&self, about: &str) -> Error {
        self.fail(Error::aborted(format!("{} was interrupted by a signal in {about}", self.describe(self.rank))))
    }

    /// Sleeps until a peer publishes something, a slice of time or `limit` at most, unless `ready` holds.
    pub fn sleep(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.words(self.rank).bell.0.sleep(&self.header().sleepers.0, limit, ready);
    }

    /// Fails the group if waiting for the `missing` members is pointless.
    pub fn check(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Result<()> {
        self.trouble(limit, about, missing).map_or(Ok(()), |error| Err(self.fail(error)))
    }

    /// Looks at the group for a call that goes on without a wait: fails once the group has, and fails the group at the limit.
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

    /// Error that makes waiting for the `missing` members pointless, if there is one.
    fn trouble(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Option<Error> {
        let any_missing = || self.peers().any(missing);
        if let Some(failure) = lost(any_missing, || self.failure()) {
            return Some(failure);
        }
        let seconds = || limit.waited().as_secs_f32();
        let me = || self.describe(self.rank);
        let absent = |peer| lost(|| missing(peer), || self.absence(peer)).map(|how| (peer, how));
        // The launcher may have ended others since.
        if let Some((peer, how)) = self.first_gone.get().copied().into_iter().chain(self.peers()).find_map(absent) {
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

    /// Error that names who has died in a wait that some are still missing from.
    fn death(&self, limit: &Limit, about: &dyn Fn() -> String, missing: &dyn Fn(Rank) -> bool) -> Option<Error> {
        let (peer, how) = self.dead_rank()?;
        // Asked again after the death was seen: else that rank may have come through before it died.
        self.peers().any(missing).then(|| {
            let (seconds, late) = (limit.waited().as_secs_f32(), self.late(missing));
            let (peer, me) = (self.describe(peer), self.describe(self.rank));
            Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s with it for {late} in {}", about()))
        })
    }
}
