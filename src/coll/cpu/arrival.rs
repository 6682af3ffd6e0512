//! The arrival: one post per rank and call, in one of two places that the parity of the call's
//! number selects.
//!
//! A rank that posts call `s + 2` over its post of call `s` has seen all ranks' posts of `s + 1`,
//! so every rank has left `s`.
#![allow(unsafe_code, reason = "copies between the group's memory and the bytes of tensors")]

use super::CpuCall;
use super::helpers::{reduce_chunk, shares_cores};
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::describe::Description;
use crate::coll::plan::CpuPlan;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::mem::layout::{INLINE_BYTES, POST_HEAD};
use crate::rank::Rank;
use crate::sync::flag::Flag;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// The head of a post, which a peer needs first. It shares a cache line with the first 32 bytes of
/// data.
#[repr(C)]
struct Head {
    flag: AtomicU64,
    fingerprint: AtomicU64,
    factor: AtomicU64,
    /// Length + 1 of every message in the table if all have the same length, otherwise 0. Exchanges
    /// of equal lengths need no further cache lines.
    even: AtomicU64,
}

const _: () = assert!(size_of::<Head>() == POST_HEAD);

/// Indices of words in the table behind the inline data.
const HEAD: usize = 0;
const BYTES: usize = 1;
const DETAIL: usize = 2;
const OFFER: usize = 3;
const SHARES_CORES: usize = 4;
const READING: usize = 5;
const UNREAD: usize = 6;
/// The lengths start in the second cache line.
const SENT: usize = 8;

/// Returns true if the data that this rank sends fit next to its flag; `plan` is the plan for the
/// lengths that this rank knows.
pub(super) fn fits_post(call: &CallSpec, plan: CpuPlan) -> bool {
    // For an all-to-all, each rank decides for itself.
    if call.op == Collective::AllToAll {
        call.inputs.iter().map(|span| span.bytes).sum::<usize>() <= INLINE_BYTES
    } else {
        plan == CpuPlan::Inline
    }
}

impl CpuCall<'_> {
    fn post(&self, rank: Rank) -> &Head {
        // SAFETY: Head consists of atomics, and `layout.post` is the offset of one for every rank
        // and parity.
        unsafe { self.control.segment().at(self.control.layout().post(rank, self.seq)) }
    }

    /// Returns the inline data of a post, valid for `INLINE_BYTES`.
    pub(super) fn posted(&self, rank: Rank) -> *mut u8 {
        self.control
            .segment()
            .ptr(self.control.layout().post(rank, self.seq) + POST_HEAD, INLINE_BYTES)
    }

    fn table(&self, rank: Rank, word: usize) -> &AtomicU64 {
        let layout = self.control.layout();
        assert!(word < layout.table_words());
        // SAFETY: an atomic, within the table behind the inline data of this post.
        unsafe {
            self.control
                .segment()
                .at(layout.post(rank, self.seq) + POST_HEAD + INLINE_BYTES + word * 8)
        }
    }

    /// Returns the offer of `rank`, see [`CpuCall::offer`]; undefined for calls that are not
    /// staged.
    pub(super) fn offered(&self, rank: Rank) -> u64 {
        self.table(rank, OFFER).load(Ordering::Relaxed)
    }

    /// Returns true if any rank has posted that ranks share cores. The same on every rank.
    pub(super) fn cores_are_shared(&self) -> bool {
        self.control.ranks().any(|rank| self.table(rank, SHARES_CORES).load(Ordering::Relaxed) != 0)
    }

    /// Returns the word of `rank` about reads of peers' memory, see [`CpuCall::reading`].
    pub(super) fn posted_reading(&self, rank: Rank) -> u64 {
        self.table(rank, READING).load(Ordering::Relaxed)
    }

    /// Returns the address of input `index` in the memory of `rank`, if peers may read it.
    pub(super) fn posted_address(&self, rank: Rank, index: usize) -> usize {
        self.table(rank, self.address_word(index)).load(Ordering::Relaxed) as usize
    }

    /// Returns the index of the table's word with the address of input `index`.
    fn address_word(&self, index: usize) -> usize {
        SENT + 2 * self.control.size() + index
    }

    /// Notifies peers, with the next stage, that this rank could not read a peer's memory.
    pub(super) fn post_unread(&self) {
        self.table(self.control.rank(), UNREAD).store(1, Ordering::Relaxed);
    }

    /// Returns true if `rank` has posted that it could not read a peer's memory; valid once this
    /// rank has seen the stage of `rank` that follows the reads.
    pub(super) fn posted_unread(&self, rank: Rank) -> bool {
        self.table(rank, UNREAD).load(Ordering::Relaxed) != 0
    }

    /// Returns how many bytes `from` sends to `to`, if posts carry the lengths.
    pub(super) fn sent(&self, from: Rank, to: Rank) -> usize {
        self.length(from, SENT + to.index())
    }

    fn received(&self, from: Rank, to: Rank) -> usize {
        self.length(to, SENT + self.control.size() + from.index())
    }

    fn length(&self, rank: Rank, word: usize) -> usize {
        let even = self.post(rank).even.load(Ordering::Relaxed);
        if even > 0 {
            even as usize - 1
        } else {
            self.table(rank, word).load(Ordering::Relaxed) as usize
        }
    }

    /// Returns the factor of `rank` under PREMUL_SUM.
    pub(super) fn factor(&self, rank: Rank) -> f64 {
        f64::from_bits(self.post(rank).factor.load(Ordering::Relaxed))
    }

    /// Returns once all ranks have posted the same call as this rank.
    pub(super) fn arrive(&self) -> Result<()> {
        self.await_posts()?;
        self.compare()
    }

    /// Compares the lengths that each rank of an all-to-all sends and expects. Returns `None` if
    /// all data are next to the flags, otherwise the length of the longest message.
    pub(super) fn compare_lengths(&self) -> Result<Option<usize>> {
        let (mut longest, mut all_inline) = (0, true);
        for from in self.control.ranks() {
            let mut total = 0usize;
            for to in self.control.ranks() {
                let (sent, expected) = (self.sent(from, to), self.received(from, to));
                if sent != expected {
                    let text = format!(
                        "{}: {} sends {sent} bytes to {}, which expects {expected} bytes",
                        self.about(),
                        self.control.describe(from),
                        self.control.describe(to)
                    );
                    return Err(self.control.fail(Error::mismatch(text)));
                }
                longest = longest.max(sent);
                total = total.saturating_add(sent);
            }
            all_inline &= total <= INLINE_BYTES;
        }
        Ok(if all_inline { None } else { Some(longest) })
    }

    /// Posts the call that this rank was asked to run, with its data if `inline`.
    pub(super) fn write_post(&self, inline: bool) {
        let (control, call, me) = (self.control, self.call, self.control.rank());
        let (sent, received): (&[Span], &[Span]) = if call.op == Collective::AllToAll {
            (&call.inputs, &call.outputs)
        } else {
            (call.agreed_lengths(), &[])
        };
        let description = Description::of(call);
        let put = |word: usize, value: u64| self.table(me, word).store(value, Ordering::Relaxed);
        put(HEAD, description.head);
        put(BYTES, description.bytes);
        put(DETAIL, description.detail);
        // Peers do not read these words if the data of all ranks are inline. In an all-to-all, the
        // data of other ranks may not be inline although this rank's are, so these words must be
        // valid.
        if !inline {
            put(OFFER, self.offer());
            put(SHARES_CORES, shares_cores().into());
            put(READING, self.reading());
            put(UNREAD, 0);
            if self.is_exchange() {
                for (i, span) in call.inputs.iter().enumerate() {
                    put(self.address_word(i), span.addr as u64);
                }
            }
        } else if call.op == Collective::AllToAll {
            put(OFFER, self.offer());
            put(SHARES_CORES, 0);
            put(READING, 0);
        }
        for (i, span) in sent.iter().enumerate() {
            put(SENT + i, span.bytes as u64);
        }
        for (i, span) in received.iter().enumerate() {
            put(SENT + control.size() + i, span.bytes as u64);
        }
        if inline {
            let mut at = self.posted(me);
            for span in call.shared_inputs() {
                // SAFETY: the inputs' bytes together fit INLINE_BYTES (`fits_post`). No peer reads
                // this post before its flag is published below, and none still reads the previous
                // one (module docs). The caller guarantees that the spans are readable.
                unsafe {
                    cpu::copy(at, span.ptr(), span.bytes, WriteMode::Cached);
                    at = at.add(span.bytes);
                }
            }
        }
        let post = self.post(me);
        post.factor.store(call.factor.to_bits(), Ordering::Relaxed);
        let even = sent
            .first()
            .filter(|first| sent.iter().chain(received).all(|span| span.bytes == first.bytes));
        post.even.store(even.map_or(0, |first| first.bytes as u64 + 1), Ordering::Relaxed);
        post.fingerprint.store(description.fingerprint(call), Ordering::Relaxed);
        if let Some(call_site) = call.call_site {
            control.call_site(me).write_end(call_site.text());
        } else if let Some(operator) = &call.compares {
            control.call_site(me).write_start(operator);
        }
        control.begin(self.seq, call.op);
        post.flag.publish(self.seq);
        control.wake_sleepers();
    }

    fn await_posts(&self) -> Result<()> {
        let missing = |peer| self.post(peer).flag.observe() != self.seq;
        self.control.wait_together(self.limit, &|| self.about(), missing)
    }

    /// Fails the group if a peer was asked to run a different call.
    fn compare(&self) -> Result<()> {
        let print = |rank| self.post(rank).fingerprint.load(Ordering::Relaxed);
        let mine = print(self.control.rank());
        if self.control.peers().all(|peer| print(peer) == mine) {
            return Ok(());
        }
        let mut text = format!(
            "ranks disagree on collective #{} of group \"{}\"",
            self.seq,
            self.control.name()
        );
        let described = |rank| {
            let word = |place| self.table(rank, place).load(Ordering::Relaxed);
            Description { head: word(HEAD), bytes: word(BYTES), detail: word(DETAIL) }
        };
        let own = described(self.control.rank());
        if self
            .control
            .peers()
            .map(described)
            .all(|other| other.without_call_site() == own.without_call_site())
            && self
                .control
                .peers()
                .map(described)
                .any(|other| other.has_call_site() != own.has_call_site())
        {
            text.push_str(": some were started with SYMM_DEBUG=call_site, others were not");
        }
        for rank in self.control.ranks() {
            let (description, member) = (described(rank), self.control.describe(rank));
            if description.compares_operators() {
                let operator = self.control.call_site(rank).read();
                let _ = write!(text, "; {member} called {operator}");
                continue;
            }
            let _ = write!(text, "; {member} called {description}");
            if description.has_call_site() {
                let _ = write!(text, " at {}", self.control.call_site(rank).read());
            }
            // A post without lengths leaves the words of an earlier call.
            if description.has_lengths() && self.control.size() <= 16 {
                let lengths: Vec<usize> =
                    self.control.ranks().map(|to| self.sent(rank, to)).collect();
                let _ = write!(text, " with lengths {lengths:?} bytes");
            }
        }
        Err(self.control.fail(Error::mismatch(text)))
    }

    /// Returns this rank's own input `index` as a source of a reduction.
    pub(super) fn own(&self, index: usize) -> InputElements {
        InputElements { ptr: self.call.inputs[index].ptr(), factor: self.call.factor }
    }

    /// Reduces `bytes` bytes of every source into `dst`.
    pub(super) fn reduce(
        &self,
        dst: *mut u8,
        sources: &[InputElements],
        bytes: usize,
        store: WriteMode,
    ) {
        reduce_chunk((self.control.order(), self.call), dst, sources, bytes, store);
    }
}
