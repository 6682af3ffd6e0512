//! Heaps of ranks that are threads, linked by a group.

use super::*;
use crate::control::tests::controls;
use crate::symm_mem::frame::HeapFrame;
use crate::symm_mem::tests::host::{Host, PAGE, read, write};
use crate::symm_mem::tests::hostile::Raw;
use std::cell::Cell;
use std::sync::{Condvar, Mutex};

const N: usize = 4;

fn limit() -> CallTimeout {
    CallTimeout::from(Instant::now(), Duration::from_secs(60))
}

/// The messages of all ranks, by step.
#[derive(Default)]
struct Table {
    messages: Mutex<Vec<[Option<Vec<u8>>; N]>>,
    changed: Condvar,
}

impl Table {
    fn step(&self, rank: usize, number: usize, own: Vec<u8>) -> Vec<Vec<u8>> {
        let mut messages = self.messages.lock().expect("not poisoned");
        if messages.len() <= number {
            messages.resize(number + 1, Default::default());
        }
        messages[number][rank] = Some(own);
        self.changed.notify_all();
        let limit = Duration::from_secs(30);
        let late =
            |messages: &mut Vec<[Option<Vec<u8>>; N]>| messages[number].iter().any(Option::is_none);
        let (messages, over) =
            self.changed.wait_timeout_while(messages, limit, late).expect("not poisoned");
        assert!(!over.timed_out(), "rank {rank} waits for others in step {number}");
        messages[number].iter().flatten().cloned().collect()
    }
}

/// Runs `body` on ranks that are threads. Each has its own heap, and a step function that
/// exchanges messages with all ranks.
fn with_ranks(body: impl Fn(&ControlBlock, usize, &Arc<Heap>, &StepFn<'_>) + Sync) {
    let (controls, table) = (controls(N as u32), Table::default());
    std::thread::scope(|scope| {
        for (rank, control) in controls.iter().enumerate() {
            let (table, body) = (&table, &body);
            scope.spawn(move || {
                let heap = Heap::new(Arc::new(Host::new(16))).expect("made");
                let number = Cell::new(0);
                let step = |bytes: usize, own: Result<Vec<u8>>| {
                    let own = own.expect("messages");
                    assert_eq!(own.len(), bytes);
                    Ok(table.step(rank, number.replace(number.get() + 1), own))
                };
                body(control, rank, &heap, &step);
            });
        }
    });
}

fn reported(heap: &Heap, step: &StepFn<'_>) -> Vec<Option<HeapAddress>> {
    let messages =
        step(HeapAddress::BYTES, Ok(heap.address().encode().to_vec())).expect("messages");
    messages.iter().map(|bytes| bytes[..].try_into().ok().map(HeapAddress::decode)).collect()
}

/// Links `heap` with the heaps at `addresses`; all ranks agree on the outcome.
fn linked(
    control: &ControlBlock,
    step: &StepFn<'_>,
    heap: Option<&Arc<Heap>>,
    addresses: &[Option<HeapAddress>],
    limit: &CallTimeout,
) -> std::result::Result<PeerHeaps, String> {
    let failed: FailureCheck = Arc::new(|| false);
    PeerHeaps::link(control, step, heap, addresses, &failed, limit).expect("agreed")
}

#[test]
fn what_a_rank_allocates_all_others_reach() {
    with_ranks(|control, me, heap, step| {
        let addresses = reported(heap, step);
        let heaps = linked(control, step, Some(heap), &addresses, &limit()).expect("linked");
        let spans = |addr: u64| vec![Span { addr: addr as usize, bytes: PAGE }];
        assert!(!heaps.holds_any(spans(heap.base()).iter()), "nothing is allocated");
        // Each rank's tensor has a different offset.
        let held: Vec<u64> = (0..=me).map(|_| heap.allocate(PAGE).expect("room")).collect();
        let address = held[me];
        assert!(heaps.holds_any(spans(address).iter()) && !heaps.holds_any(spans(4096).iter()));
        write(address, 100 + me as u64);
        assert!(heaps.reachable(spans(address)[0]));
        assert!(!heaps.reachable(Span { addr: address as usize, bytes: 2 * PAGE }));
        let messages =
            step(8, Ok((address - heap.base()).to_le_bytes().to_vec())).expect("messages");
        for (rank, offset) in messages.iter().enumerate() {
            let offset = u64::from_le_bytes(offset[..].try_into().expect("8 bytes"));
            assert_eq!(
                read(heaps.bases[rank] + offset),
                100 + rank as u64,
                "rank {rank} as rank {me} sees it"
            );
        }
        step(0, Ok(Vec::new())).expect("all have looked");
    });
}

#[test]
fn groups_come_and_go_in_any_order() {
    with_ranks(|control, me, heap, step| {
        let addresses = reported(heap, step);
        heap.allocate(PAGE).expect("room");
        let mut before = None;
        let begun = Instant::now();
        for round in 0..20 {
            let heaps = linked(control, step, Some(heap), &addresses, &limit()).expect("linked");
            assert!(
                heaps.reachable(Span { addr: heap.base() as usize, bytes: PAGE }),
                "round {round}"
            );
            step(0, Ok(Vec::new())).expect("all have looked");
            // Some ranks drop a group before they make the next one, and some after it, so that
            // a rank may find a link which is just closing.
            before = (round % N == me).then_some(heaps);
            std::thread::sleep(Duration::from_micros((me * round * 7 % 50) as u64));
        }
        drop(before);
        assert!(
            begun.elapsed() < HEAP_LINK_TIMEOUT,
            "nobody waits for a link that has closed: {:?}",
            begun.elapsed()
        );
    });
}

#[test]
fn one_rank_without_a_heap_is_enough_for_none_to_link() {
    with_ranks(|control, me, heap, step| {
        let mut addresses = reported(heap, step);
        addresses[2] = None;
        let own = (me != 2).then_some(heap);
        let reason = linked(control, step, own, &addresses, &limit()).err().expect("not linked");
        assert!(reason.contains("rank 2"), "{reason}");
    });
}

#[test]
fn a_link_that_does_not_come_is_named_before_the_limit() {
    with_ranks(|control, me, heap, step| {
        let mut addresses = reported(heap, step);
        // All others connect to the rank with the highest key; they get the name of a listener
        // that does not exist.
        let last =
            (0..N).max_by_key(|&rank| addresses[rank].map(|address| address.key)).expect("ranks");
        if let Some(address) = &mut addresses[last] {
            address.listener = [7; 16];
        }
        let begun = Instant::now();
        let limit = CallTimeout::from(begun, Duration::from_secs(3));
        let Err(reason) = linked(control, step, Some(heap), &addresses, &limit) else {
            panic!("rank {me} is linked with a rank that cannot be found")
        };
        assert!(
            reason.contains("no link with") && reason.contains(&format!("rank {last}")),
            "{reason}"
        );
        assert!(limit.remaining().is_some(), "{:?}", begun.elapsed());
    });
}

#[test]
fn a_window_waits_for_a_peer_that_was_late_until_the_deadline_or_a_reason_to_stop() {
    let heap = Heap::new(Arc::new(Host::new(16))).expect("made");
    let _attention = heap.attend().expect("runs");
    let peer = Raw::new(&heap);
    let hold = peer.hold(&heap);
    hold.link().note_late();
    let bases = vec![heap.base(), hold.base()];
    let heaps = PeerHeaps { heap: Arc::clone(&heap), holds: vec![None, Some(hold)], bases };
    let address = heap.allocate(PAGE).expect("room");
    let span = Span { addr: address as usize, bytes: PAGE };
    let within = |limit| Instant::now() + limit;
    let (short, long) = (Duration::from_millis(20), Duration::from_secs(60));

    assert_eq!(heaps.unmapped_by(span, within(short), &|| Ok(())), Ok(vec![Rank(1)]));
    let checks = Cell::new(0);
    let turn = || checks.replace(checks.get() + 1);
    let stopped = || if turn() < 2 { Ok(()) } else { Err(Error::aborted("destroyed")) };
    let error = heaps.unmapped_by(span, within(long), &stopped).expect_err("stopped");
    assert_eq!((error, checks.get()), (Error::aborted("destroyed"), 3));
    checks.set(0);
    let answering = || {
        if turn() == 2 {
            peer.say(HeapFrame::Accepted { id: 1 });
        }
        Ok(())
    };
    assert_eq!(heaps.unmapped_by(span, within(long), &answering), Ok(Vec::new()));
    assert!(checks.get() > 2, "the peer answers in the third turn");

    heap.allocate(PAGE).expect("room");
    peer.say(HeapFrame::Refused { id: 2 });
    let span = Span { bytes: 2 * PAGE, ..span };
    assert_eq!(heaps.unmapped_by(span, within(long), &|| Ok(())), Ok(vec![Rank(1)]), "refused");
}
