//! All-to-alls in symmetric memory in which some ranks have no long message: all ranks must count
//! the same handshake epochs. Sends and receives in symmetric memory: once the sender sees the
//! offer, the rest of a message is zero-copy.

use crate::host::{Host, at_once};
use std::time::Duration;
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::plan::{self, CudaThresholds};
use symm::dtype::{DType, ReduceOp};

const RANKS: usize = 3;
const LONG: usize = 2 << 20;
const SHORT: usize = 64;

/// `lengths[from][to]` in bytes.
type Lengths = [[usize; RANKS]; RANKS];

/// Rank `me`'s call, and the expected content of each output: address, bytes, value.
fn all_to_all(
    host: &Host,
    me: usize,
    lengths: &Lengths,
) -> (CallSpec<'static>, Vec<(usize, usize, u8)>) {
    let heap = &host.heaps[me];
    let span = |bytes: usize, fill: u8| {
        let at = heap.take(bytes);
        // SAFETY: the heap has just allocated these bytes.
        unsafe { std::ptr::write_bytes(at, fill, bytes) };
        Span { addr: at as usize, bytes }
    };
    let value = |from: usize, to: usize| (16 * from + to + 1) as u8;
    let inputs: Vec<Span> = (0..RANKS).map(|to| span(lengths[me][to], value(me, to))).collect();
    let outputs: Vec<Span> = (0..RANKS).map(|from| span(lengths[from][me], 0)).collect();
    let wanted = |(from, output): (usize, &Span)| (output.addr, output.bytes, value(from, me));
    let expected = outputs.iter().enumerate().map(wanted).collect();
    let (op, inputs, outputs) = (Collective::AllToAll, inputs.into(), outputs.into());
    (CallSpec { op, inputs, outputs, ..CallSpec::barrier(None) }, expected)
}

/// A group with the thresholds of GPUs, but fewer lanes and threads. Messages of `SHORT` bytes use
/// LL lines and take no part in the handshake.
fn host() -> Host {
    let tuning = CudaThresholds { lanes: 2, threads: 8, ..CudaThresholds::of(RANKS) };
    let mut host = Host::with_tuning(RANKS, tuning);
    host.handshake(256 << 20);
    host.timeout = Duration::from_secs(20);
    host
}

/// Runs one call after another, each rank as fast as it can.
fn run(program: &[Lengths]) {
    let host = host();
    let calls: Vec<Vec<_>> = (0..RANKS)
        .map(|me| program.iter().map(|lengths| all_to_all(&host, me, lengths)).collect())
        .collect();
    at_once(0..RANKS, |me| {
        (1..).zip(&calls[me]).for_each(|(number, (call, _))| host.call(me, number, call));
    });
    host.assert_well();
    assert!(host.direct().iter().all(|&kernels| kernels > 0), "{:?}", host.direct());
    for (addr, bytes, value) in calls.iter().flatten().flat_map(|(_, expected)| expected) {
        // SAFETY: the tensors are in heaps that still exist; all kernels have ended.
        let got = unsafe { std::slice::from_raw_parts(*addr as *const u8, *bytes) };
        assert!(got.iter().all(|byte| byte == value), "{bytes} bytes of {value}");
    }
}

#[test]
fn a_rank_without_a_long_message_counts_the_rounds_of_the_others() {
    run(&[[[LONG; RANKS]; RANKS]; 2]);
    let pair = [[LONG, LONG, SHORT], [LONG, LONG, SHORT], [SHORT; RANKS]];
    run(&[pair, [[LONG; RANKS]; RANKS]]);
    // Only one rank of a pair has a long message, in a different pair each time.
    let one_way = [[SHORT; RANKS], [LONG, SHORT, SHORT], [SHORT; RANKS]];
    let other = [[SHORT, SHORT, LONG], [SHORT; RANKS], [SHORT; RANKS]];
    run(&[one_way, other, pair, one_way, [[LONG; RANKS]; RANKS], other]);
}

/// Rank 0 sends `bytes` bytes to rank 1, which receives them in symmetric memory, `beyond` bytes
/// past a 16-byte boundary, or in other memory. Returns whether the sender counts the message as
/// zero-copy, and whether the receiver does.
fn message(host: &Host, bytes: usize, symmetric: bool, beyond: usize) -> (bool, bool) {
    const CANARY: u8 = 0xA5;
    let given: Vec<u8> = (0..bytes).map(|at| (at / 7 + at) as u8).collect();
    let mut other = vec![CANARY; bytes + 64];
    let room = if symmetric { host.heaps[1].take(bytes + 64) } else { other.as_mut_ptr() };
    // SAFETY: `bytes + 64` bytes that no other code uses.
    unsafe { std::ptr::write_bytes(room, CANARY, bytes + 64) };
    let (from, to) = (given.as_ptr() as usize, room as usize + 16 + beyond);
    let plan = plan::transfers(&host.layout, &host.tuning);
    let launch = |me: usize, sends: &[_], receives: &[_]| {
        let launch = host.context(me, 0, None).transfers(sends, receives, [0; 2], plan).unwrap();
        host.run(me, &launch, DType::U8, ReduceOp::Sum);
    };
    let before = (host.direct()[0], host.received_in_place()[1]);
    std::thread::scope(|scope| {
        scope.spawn(|| launch(0, &[(1, Span { addr: from, bytes })], &[]));
        launch(1, &[], &[(0, Span { addr: to, bytes })]);
    });
    host.assert_well();
    // SAFETY: as above; all kernels have ended.
    let all = unsafe { std::slice::from_raw_parts(room, bytes + 64) };
    let (front, rest) = all.split_at(16 + beyond);
    assert!(rest[..bytes] == given, "{bytes} bytes, symmetric: {symmetric}, {beyond} beyond");
    assert!(
        front.iter().chain(&rest[bytes..]).all(|&byte| byte == CANARY),
        "bytes beside the message were written"
    );
    (host.direct()[0] > before.0, host.received_in_place()[1] > before.1)
}

#[test]
fn a_long_message_goes_direct_where_its_receiver_offers_a_place() {
    let host = host();
    // More than the slots of two lanes hold, so that the sender waits for the receiver and sees its
    // offer.
    for odd in [0, 1, 15, 16] {
        assert_eq!(message(&host, LONG + odd, true, 0), (true, true), "{odd} bytes more");
    }
    assert_eq!(message(&host, LONG, true, 8), (false, false), "stores are of 16 bytes");
    assert_eq!(message(&host, LONG, false, 3), (false, false), "nobody else reaches that");
    assert_eq!(message(&host, 300_000, true, 0), (false, false), "too short to look");
    assert_eq!(message(&host, LONG, true, 0), (true, true), "after all these");
}
