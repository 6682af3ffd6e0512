//! The workspace of fused matmuls: a call's data have been read by all peers when they are
//! overwritten two calls later, without a barrier in between.

use super::failure::Thirty2;
use super::signals::Side;
use super::{Cell, both, cells};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use symm::fused::schedule::{self, PadChannel, StreamStep};
use symm::fused::workspace::{CallStart, Workspace};
use symm::fused::{GatherPlan, ShardBatch};
use symm::window::signal_host::meet;

const RANKS: usize = 2;
const PIECES: usize = 2;
const BYTES: usize = 1;

/// The workspaces of both ranks, in which a piece has a part for each rank, and their pads.
struct Memory {
    parts: [[[Cell; RANKS]; PIECES]; RANKS],
    words: [[Thirty2; 4]; RANKS],
}

/// As in `SignalPads::put` and `SignalPads::wait`: changes the word once the other rank has set it
/// to `from`.
fn change(word: &Thirty2, from: u32, to: u32) {
    while word.0.load(Ordering::Acquire) != from {
        thread::yield_now();
    }
    word.0.store(to, Ordering::Release);
}

#[derive(Clone, Copy)]
enum Op {
    Gather,
    Scatter,
}

/// The value that `rank` writes to the workspace for rank `of` in the call with index `call`.
fn value(call: usize, rank: usize, of: usize) -> u64 {
    (100 * call + 10 * rank + of + 1) as u64
}

/// Runs the calls as rank `me`, and each step when it is enqueued. Only the turns and the signals
/// within calls order the ranks.
fn run(memory: &Memory, me: usize, ops: &[Op], turns: fn(usize) -> usize) {
    let peer = 1 - me;
    let word = |rank: usize, channel: PadChannel| &memory.words[rank][channel as usize];
    let mut workspace = Workspace::new(true);
    for (call, op) in ops.iter().enumerate() {
        let turn = loop {
            match workspace.begin("test", BYTES, 0).unwrap() {
                CallStart::Turn(turn) => break turn,
                CallStart::Make(memory) => workspace.made(&memory),
            }
        };
        let piece = turns(usize::from(turn.offset > 0));
        let plan = GatherPlan {
            own_early: false,
            products: vec![ShardBatch { ranks: peer..peer + 1, arrived: 1 }],
        };
        let (steps, from) = match op {
            Op::Gather => (schedule::gather(RANKS, me, &plan, turn.entry, false), 0),
            Op::Scatter => (schedule::scatter(RANKS, me, 0, turn.entry), me),
        };
        for step in steps {
            match (step, op) {
                (StreamStep::Multiply(_), Op::Gather)
                | (StreamStep::Mark(..) | StreamStep::After(..) | StreamStep::OwnRows(_), _) => {}
                (StreamStep::Barrier(_, channel), _) => {
                    let (inward, outward) = (word(me, channel), word(peer, channel));
                    meet(&Side { inward, outward, me }).unwrap()
                }
                (StreamStep::Signal(to), _) => change(word(to, PadChannel::Part), 0, 1),
                (StreamStep::Wait(_), _) => change(word(me, PadChannel::Part), 1, 0),
                (StreamStep::Share, _) => memory.parts[me][piece][0].write(value(call, me, 0)),
                (StreamStep::Multiply(ranks), Op::Scatter) => {
                    memory.parts[me][piece][ranks.start].write(value(call, me, ranks.start));
                }
                (StreamStep::Fetch(_) | StreamStep::Sum, _) => {
                    assert_eq!(memory.parts[peer][piece][from].read(), value(call, peer, from))
                }
            }
        }
    }
}

fn calls(ops: &'static [Op], turns: fn(usize) -> usize) {
    let make = || Memory {
        parts: [(); RANKS].map(|()| [(); PIECES].map(|()| cells())),
        words: [(); RANKS].map(|()| [(); 4].map(|()| Thirty2(AtomicU32::new(0)))),
    };
    both(2, make, move |memory, me| run(memory, me, ops, turns));
}

#[test]
fn two_pieces_suffice_without_a_barrier_at_a_call_s_end() {
    calls(&[Op::Gather, Op::Gather, Op::Gather], |piece| piece);
    calls(&[Op::Scatter, Op::Scatter, Op::Scatter], |piece| piece);
    // A call between two calls of the other kind must not touch their pieces.
    calls(&[Op::Gather, Op::Scatter, Op::Gather], |piece| piece);
    calls(&[Op::Scatter, Op::Gather, Op::Scatter], |piece| piece);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_piece_does_not() {
    calls(&[Op::Gather, Op::Gather], |_| 0);
}
