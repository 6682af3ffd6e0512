//! A peer's words in the control block: its post, its stage counter, the failure record. No bytes
//! may make a collective panic, write outside its outputs, or exceed its time limit.
#![no_main]

#[path = "../peer.rs"]
mod peer;

use libfuzzer_sys::fuzz_target;
use peer::{CANARY, ME, PEER, blank, control};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use symm::coll::call::{Call, CallSpec, Collective, Span};
use symm::coll::cpu::CpuRunner;
use symm::coll::describe::Description;
use symm::coll::plan::CpuThresholds;
use symm::mem::layout::{INLINE_BYTES, MEMBER_BYTES, POST_HEAD};
use symm::rank::Rank;
use symm::sync::flag::Flag;
use symm::sync::timeout::CallTimeout;

const MARGIN: usize = 64;

/// Memory of one tensor between canaries.
struct Guarded(Vec<u8>);

impl Guarded {
    fn new(bytes: usize) -> Self {
        Self(vec![CANARY; bytes + 2 * MARGIN])
    }
    fn span(&mut self) -> Span {
        Span { addr: self.0.as_mut_ptr() as usize + MARGIN, bytes: self.0.len() - 2 * MARGIN }
    }
    fn intact(&self) -> bool {
        let end = self.0.len() - MARGIN;
        self.0[..MARGIN].iter().chain(&self.0[end..]).all(|&byte| byte == CANARY)
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[op, size, stage, flags], rest)) = data.split_first_chunk::<4>() else { return };
    let Some(op) = Collective::from_code(op % 9) else { return };
    let count = usize::from(size) * if flags & 1 != 0 { 2048 } else { 4 };
    let (root, n) = (u32::from(flags >> 1 & 1), 2);
    let me_root = root == ME.0;
    let when = |yes: bool, count: usize| if yes { count } else { 0 };
    let (inputs, outputs) = match op {
        Collective::Barrier => (0, 0),
        Collective::Broadcast => (when(me_root, 1), when(!me_root, 1)),
        Collective::AllReduce => (1, 1),
        Collective::Reduce => (1, when(me_root, 1)),
        Collective::AllGather => (1, n),
        Collective::Gather => (1, when(me_root, n)),
        Collective::Scatter => (when(me_root, n), 1),
        Collective::ReduceScatter => (n, 1),
        Collective::AllToAll => (n, n),
        Collective::AllReduceAddRmsNorm => unreachable!("codes end before it"),
    };
    let mut memory: Vec<Guarded> = (0..inputs + outputs).map(|_| Guarded::new(count)).collect();
    let spans: Vec<Span> = memory.iter_mut().map(Guarded::span).collect();
    let (inputs, outputs) = spans.split_at(inputs);
    let spec = CallSpec {
        op,
        root: Rank(root),
        inputs: inputs.into(),
        outputs: outputs.into(),
        ..CallSpec::barrier(None)
    };
    // SAFETY: the memory lives as long as this function, which is its only user.
    let call = unsafe { Call::new(spec, ME, n) }.expect("it is well-formed");
    let control = Arc::new(control());
    blank(&control, 0, control.layout().control_bytes());
    let (segment, layout) = (control.segment(), control.layout());
    let (post, table) = (layout.post(PEER, 1), layout.table_words() * 8);
    let write = |at: usize, room: usize, bytes: &mut &[u8]| {
        let (now, later) = bytes.split_at(bytes.len().min(room));
        // SAFETY: `now` fits in the room at `at`, which belongs to the peer, and no peer runs.
        unsafe { segment.ptr(at, room).copy_from_nonoverlapping(now.as_ptr(), now.len()) };
        *bytes = later;
    };
    let word = |at: usize| {
        // SAFETY: all words of the control block are atomics.
        unsafe { segment.at::<AtomicU64>(at) }
    };
    let mut rest = rest;
    if flags & 4 != 0 {
        write(0, 64, &mut rest);
        // Readers wait while the record is being written; another test covers that state.
        let state = word(0).load(Ordering::Relaxed);
        word(0)
            .store(state & !0xffff_ffff | [0, 2][usize::from(flags >> 3 & 1)], Ordering::Relaxed);
    }
    write(post + POST_HEAD + INLINE_BYTES, table, &mut rest);
    write(post, POST_HEAD, &mut rest);
    if flags & 16 != 0 {
        write(layout.member(PEER), MEMBER_BYTES, &mut rest);
    }
    if flags & 32 == 0 {
        // Otherwise every call would be rejected as a mismatch.
        word(post + 8).store(Description::of(&call).fingerprint(&call), Ordering::Relaxed);
    }
    word(post).publish(1);
    control.stage(PEER).publish(if flags & 64 != 0 { u64::MAX } else { stage.into() });
    let (limit, begun) = (CallTimeout::from(Instant::now(), Duration::ZERO), Instant::now());
    let outcome = CpuRunner::new(Arc::clone(&control), CpuThresholds::DEFAULT, Arc::default())
        .run(&call, &limit);
    assert!(
        outcome.is_ok() || outcome.is_err_and(|error| !error.message.is_empty()) || flags & 4 != 0
    );
    assert!(begun.elapsed() < Duration::from_secs(5), "stayed for {:?}", begun.elapsed());
    assert!(memory.iter().all(Guarded::intact), "written outside the tensors");
});
