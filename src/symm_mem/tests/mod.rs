//! Heaps of host memory, linked within one process and between two.

pub(crate) mod host;
pub(super) mod hostile;
mod links;
mod processes;

use super::heap::Heap;
use super::link::HeapLink;
use super::{FailureCheck, HeapAddress, LinkRef, allocate, release, supported};
use crate::error::ErrorKind;
use host::{Host, PAGE};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

fn heap(pages: usize) -> (Arc<Heap>, Arc<Host>) {
    let host = Arc::new(Host::new(pages));
    (Heap::new(Arc::clone(&host) as Arc<_>).expect("made"), host)
}

fn healthy() -> FailureCheck {
    Arc::new(|| false)
}

/// Links two heaps; returns each heap's claim to its link with the other.
fn link(one: &Heap, other: &Heap, failed: &FailureCheck) -> (LinkRef, LinkRef) {
    let (near, number) =
        one.connect(&other.address(), failed, Instant::now() + PATIENCE).expect("connects");
    let far = other
        .meet(&one.address(), number, failed, Instant::now() + PATIENCE)
        .expect("the thread runs")
        .expect("came");
    (near, far)
}

/// Makes and links two heaps; returns both and their claims to the link.
fn linked(pages: usize, others: usize) -> (Arc<Heap>, Arc<Heap>, LinkRef, LinkRef) {
    let (one, other) = (heap(pages).0, heap(others).0);
    let (near, far) = link(&one, &other, &healthy());
    (one, other, near, far)
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the address at which the process with `hold` maps the memory at `address` of `heap`.
fn seen(hold: &LinkRef, heap: &Heap, address: u64) -> u64 {
    hold.base() + (address - heap.base())
}

fn reachable(heap: &Heap, address: u64, bytes: usize, hold: &LinkRef) -> bool {
    heap.reachable(address, bytes, std::iter::once(hold), PATIENCE)
}

fn mapped(hold: &LinkRef) -> usize {
    HeapLink::remote(hold.link()).mapped()
}

#[test]
fn segments_take_the_next_room_and_then_the_first() {
    let (heap, _) = heap(8);
    let make = |pages: usize| heap.allocate(pages * PAGE).expect("room");
    let page = PAGE as u64;
    let (a, b, c) = (make(2), make(3), make(1));
    assert_eq!([a, b, c].map(|address| (address - heap.base()) / page), [0, 2, 5]);
    assert_eq!(heap.segment(b + page).map(|(_, left)| left), Some(2 * PAGE));
    heap.release(b).expect("known");
    assert_eq!(heap.segment(b), None);
    assert_eq!(
        heap.allocate(1).expect("rounded up"),
        heap.base() + 6 * page,
        "behind the last one"
    );
    assert_eq!(make(2), b, "the first hole");
    assert_eq!(make(1), b + 2 * page, "what is left of it");
    make(1);
    let error = heap.allocate(PAGE).expect_err("nothing is left");
    assert!(
        error.kind == ErrorKind::Config
            && error.message.contains("out of memory")
            && error.message.contains(&PAGE.to_string()),
        "{error}"
    );
    assert_eq!(heap.allocate(usize::MAX).expect_err("too much").kind, ErrorKind::Config);
    assert_eq!(heap.release(a + 1).expect_err("no segment begins there").kind, ErrorKind::Value);
    heap.release(a).expect("known");
    assert_eq!(heap.release(a).expect_err("it is gone").kind, ErrorKind::Value);
}

#[test]
fn what_a_window_has_pinned_stays_when_its_owner_gives_it_back() {
    let (one, _other, _near, far) = linked(8, 8);
    let address = one.allocate(PAGE).expect("room");
    until("the offer", || mapped(&far) == 1);
    let place = seen(&far, &one, address);
    let pin = far.pin(place - far.base(), PAGE).expect("mapped");
    assert!(far.pin(place - far.base() + PAGE as u64, 1).is_none(), "nothing lies there");
    host::write(address, 7);
    assert_eq!(host::read(place), 7);
    one.release(address).expect("known");
    assert_eq!(host::read(place), 0, "mapped still, though the memory is given back");
    // Other segments of the owner do not affect the pinned one.
    let next = one.allocate(PAGE).expect("room");
    until("the next offer", || mapped(&far) == 2);
    host::write(next, 9);
    assert_eq!((host::read(place), host::read(seen(&far, &one, next))), (0, 9));
    drop(pin);
    assert_eq!(mapped(&far), 1);
}

#[test]
fn what_an_own_window_shows_stays_until_the_last_of_them_goes() {
    let (one, _other, _near, far) = linked(8, 8);
    let (address, next) = (one.allocate(PAGE).expect("room"), one.allocate(PAGE).expect("room"));
    until("the offers", || mapped(&far) == 2);
    let pins = [
        one.show(address + 8, PAGE - 8).expect("there"),
        one.show(address, 2 * PAGE).expect("both"),
        one.show(next, 0).expect("there"),
    ];
    assert_eq!(one.show(address, 2 * PAGE + 1).err().expect("too long").kind, ErrorKind::Value);
    assert_eq!(one.show(one.base() - 1, 1).err().expect("outside").kind, ErrorKind::Value);
    host::write(address, 7);
    one.release(address).expect("known");
    assert_eq!(one.release(address).expect_err("twice").kind, ErrorKind::Value);
    assert_eq!(one.segment(address), None, "no new window");
    assert_eq!(one.show(address, 1).err().expect("given back").kind, ErrorKind::Value);
    assert!(reachable(&one, address, PAGE, &far), "calls on what a window shows need no staging");
    let [first, second, third] = pins;
    drop(first);
    assert_eq!(
        (host::read(address), host::read(seen(&far, &one, address)), mapped(&far)),
        (7, 7, 2)
    );
    drop(second);
    until("the withdrawal", || mapped(&far) == 1);
    host::write(next, 9);
    drop(third);
    assert_eq!(host::read(next), 9, "nobody gave this one back");
    assert_eq!(one.allocate(6 * PAGE).expect("behind"), next + PAGE as u64);
    assert_eq!(one.allocate(PAGE).expect("its place"), address);
    assert_eq!(host::read(address), 0);
}

#[test]
fn what_a_peer_wrote_too_late_is_no_part_of_what_comes_next() {
    let (one, _other, _near, far) = linked(1, 8);
    let address = one.allocate(PAGE).expect("room");
    until("the offer", || mapped(&far) == 1);
    let place = seen(&far, &one, address);
    let pin = far.pin(place - far.base(), PAGE).expect("mapped");
    one.release(address).expect("known");
    host::write(place, 7);
    assert_eq!(one.allocate(PAGE).expect("the same place"), address);
    assert_eq!(host::read(address), 0);
    drop(pin);
}

// proves P21
#[test]
fn what_a_dead_peer_had_goes_once_all_groups_are_done_with_it_but_for_windows() {
    let (one, other, _near, far) = linked(8, 8);
    let second = far.link().hold(other.attend().expect("runs"), healthy()).expect("open");
    let (shown, plain) = (one.allocate(PAGE).expect("room"), one.allocate(PAGE).expect("room"));
    until("the offers", || mapped(&far) == 2);
    let pin = far.pin(seen(&far, &one, shown) - far.base(), PAGE).expect("mapped");
    host::write(shown, 7);
    far.release_dead();
    assert_eq!(
        (mapped(&far), far.link().is_closed()),
        (2, false),
        "kernels of the second group may use it"
    );
    host::write(plain, 8);
    assert_eq!(host::read(seen(&far, &one, plain)), 8);
    second.release_dead();
    assert_eq!((mapped(&far), far.link().is_closed()), (1, true));
    assert_eq!(host::read(seen(&far, &one, shown)), 7, "a window shows it");
    drop(pin);
}

#[test]
fn a_failure_to_make_memory_leaves_its_place_free() {
    let (heap, host) = heap(4);
    host.exhausted.store(true, Ordering::Relaxed);
    assert_eq!(heap.allocate(PAGE).expect_err("no memory").kind, ErrorKind::Config);
    assert!(heap.is_empty());
    host.exhausted.store(false, Ordering::Relaxed);
    assert_eq!(heap.allocate(4 * PAGE).expect("all of it"), heap.base());
}

#[test]
fn what_cannot_be_waited_for_is_given_back_later() {
    let (heap, host) = heap(3);
    let (one, two) = (heap.allocate(PAGE).expect("room"), heap.allocate(PAGE).expect("room"));
    host.busy.store(true, Ordering::Relaxed);
    heap.release(one).expect("later");
    assert!(!heap.reachable(one, 1, std::iter::empty::<&LinkRef>(), Duration::ZERO));
    assert_eq!(heap.release(one).expect_err("twice").kind, ErrorKind::Value);
    assert_ne!(heap.allocate(PAGE).expect("room"), one, "its kernels may still run");
    host.busy.store(false, Ordering::Relaxed);
    heap.release(two).expect("known");
    assert_eq!(heap.allocate(PAGE).expect("room"), one);
}

#[test]
fn a_heap_is_known_by_what_it_says_of_itself() {
    let (heap, _) = heap(4);
    assert_eq!(HeapAddress::decode(&heap.address().encode()), heap.address());
    assert!(heap.contains(heap.base()) && heap.contains(heap.base() + 4 * PAGE as u64 - 1));
    assert!(!heap.contains(heap.base() - 1) && !heap.contains(heap.base() + 4 * PAGE as u64));
}

/// A group that fails on request.
fn mortal() -> (FailureCheck, Arc<AtomicBool>) {
    let dead = Arc::new(AtomicBool::new(false));
    let requested = Arc::clone(&dead);
    (Arc::new(move || requested.load(Ordering::Relaxed)), dead)
}

#[test]
fn what_is_no_symmetric_memory_cannot_be_given_back() {
    let error = release(4096).expect_err("nothing lies there");
    error.assert_says(ErrorKind::Value, &["0x1000"]);
}

#[test]
fn a_device_that_is_not_there_shares_nothing() {
    assert!(!supported(4711));
    assert_eq!(
        allocate(4711, 1).expect_err("no such device").kind,
        allocate(4711, 1).expect_err("nor later").kind
    );
}
