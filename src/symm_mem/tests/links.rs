//! Segments between two heaps of one process.

use super::host::{PAGE, read, write};
use super::*;

#[test]
fn a_segment_lies_at_its_offset_for_every_peer() {
    let ((one, _), (other, _)) = (heap(16), heap(32));
    let early = one.allocate(2 * PAGE).expect("room");
    let (near, far) = link(&one, &other, &healthy());
    let late = one.allocate(PAGE).expect("room");
    let theirs = other.allocate(PAGE).expect("room");
    assert!(
        reachable(&one, early, 2 * PAGE, &near)
            && reachable(&one, late, 8, &near)
            && reachable(&other, theirs, PAGE, &far)
    );
    for (at, here) in [
        (seen(&far, &one, early) + PAGE as u64, early + PAGE as u64),
        (seen(&far, &one, late), late),
    ] {
        write(at, 4711);
        assert_eq!(read(here), 4711, "what the peer stores is there");
    }
    write(theirs, 815);
    assert_eq!(read(seen(&near, &other, theirs)), 815);
    assert!(reachable(&one, early, 3 * PAGE, &near), "two segments side by side are one range");
    assert!(
        !reachable(&one, early, 4 * PAGE, &near) && !reachable(&one, late + PAGE as u64, 1, &near),
        "nothing lies behind them"
    );
    assert!(!reachable(&one, theirs, 1, &near), "another heap's");
}

#[test]
fn a_segment_that_is_given_back_is_gone_for_the_peer_and_its_place_is_used_again() {
    let (one, _other, near, far) = linked(1, 16);
    for round in 0..50u64 {
        let address = one.allocate(PAGE).expect("room");
        assert_eq!(address, one.base());
        assert!(reachable(&one, address, PAGE, &near));
        assert_eq!(read(seen(&far, &one, address)), 0, "fresh");
        write(seen(&far, &one, address), round + 1);
        one.release(address).expect("known");
        assert_eq!(mapped(&far), 0, "release waits for it");
        assert!(!reachable(&one, address, 1, &near));
    }
}

#[test]
fn a_failed_group_keeps_what_its_kernels_may_still_use() {
    let ((one, _), (other, _)) = (heap(1), heap(16));
    let (failed, dead) = mortal();
    let (near, far) = link(&one, &other, &healthy());
    let doomed = far.link().hold(other.attend().expect("runs"), failed).expect("open");
    let address = one.allocate(PAGE).expect("room");
    assert!(reachable(&one, address, 8, &near));
    write(address, 7);
    dead.store(true, Ordering::Relaxed);
    one.release(address).expect("known");
    assert_eq!(
        (mapped(&far), read(seen(&far, &one, address))),
        (1, 0),
        "the host's pages are gone, the mapping is not"
    );
    let again = one.allocate(PAGE).expect("room");
    assert_eq!(again, address);
    assert!(!reachable(&one, again, 8, &near), "the peer cannot map it yet");
    drop(doomed);
    assert_eq!(mapped(&far), 0, "the failed group was the last that could");
    one.release(again).expect("what was refused is withdrawn like anything else");
    let third = one.allocate(PAGE).expect("room");
    assert!(reachable(&one, third, 8, &near));
    assert!(!far.link().is_closed());
}

#[test]
fn giving_back_makes_failures_known_before_peers_hear_of_it() {
    let ((one, _), (other, _)) = (heap(16), heap(16));
    let requested = Arc::new(AtomicBool::new(false));
    let (ask, reported) = (Arc::clone(&requested), Arc::clone(&requested));
    let (near, number) = one
        .connect(
            &other.address(),
            &(Arc::new(move || ask.swap(true, Ordering::SeqCst)) as FailureCheck),
            Instant::now() + PATIENCE,
        )
        .expect("connects");
    let failed: FailureCheck = Arc::new(move || reported.load(Ordering::SeqCst));
    let far = other
        .meet(&one.address(), number, &failed, Instant::now() + PATIENCE)
        .expect("runs")
        .expect("came");
    let address = one.allocate(PAGE).expect("room");
    assert!(reachable(&one, address, 8, &near));
    one.release(address).expect("known");
    assert_eq!(mapped(&far), 1, "the peer saw the failure that the owner had found, and keeps it");
}

/// Checks that memory of `one` which is made while `failing` is set is refused at once, and that
/// memory which is made later is mapped.
fn is_refused_while(failing: &AtomicBool, one: &Heap, (near, far): &(LinkRef, LinkRef)) {
    failing.store(true, Ordering::Relaxed);
    let address = one.allocate(PAGE).expect("room");
    let begun = Instant::now();
    assert!(!reachable(one, address, 8, near));
    assert!(begun.elapsed() < PATIENCE / 2, "it is said: {:?}", begun.elapsed());
    one.release(address).expect("known");
    failing.store(false, Ordering::Relaxed);
    let address = one.allocate(PAGE).expect("room");
    assert!(reachable(one, address, 8, near) && mapped(far) == 1);
}

#[test]
fn a_peer_that_cannot_map_refuses() {
    let ((one, _), (other, host)) = (heap(16), heap(16));
    is_refused_while(&host.alone, &one, &link(&one, &other, &healthy()));
}

#[test]
fn a_segment_that_cannot_be_offered_counts_as_refused_and_the_link_stays() {
    let ((one, host), (other, _)) = (heap(16), heap(16));
    let linked = link(&one, &other, &healthy());
    is_refused_while(&host.private, &one, &linked);
    let (near, far) = linked;
    assert!(!near.link().is_closed() && !far.link().is_closed());
}

#[test]
fn groups_share_a_link_which_closes_with_the_last_and_is_made_again() {
    let ((one, _), (other, _)) = (heap(16), heap(16));
    let address = one.allocate(PAGE).expect("room");
    let (near, far) = link(&one, &other, &healthy());
    let (second, same) = link(&one, &other, &healthy());
    assert_eq!((near.base(), far.base()), (second.base(), same.base()));
    drop((near, far));
    assert!(reachable(&one, address, 8, &second), "the second group still has it");
    let closed = Arc::downgrade(second.link());
    drop(second);
    until("the peer's end closed", || same.link().is_closed());
    assert_eq!(mapped(&same), 1, "its kernels may still run");
    let (near, far) = link(&one, &other, &healthy());
    assert!(reachable(&one, address, 8, &near) && mapped(&far) == 1);
    assert_ne!(far.base(), same.base(), "a range of its own");
    drop(same);
    until("the old link was let go", || closed.upgrade().is_none());
    assert!(reachable(&one, address, 8, &near));
}

#[test]
fn every_peer_must_have_accepted() {
    let ((one, _), (second, _), (third, host)) = (heap(16), heap(16), heap(16));
    let address = one.allocate(PAGE).expect("room");
    host.alone.store(true, Ordering::Relaxed);
    let holds = [link(&one, &second, &healthy()), link(&one, &third, &healthy())];
    assert!(!one.reachable(address, 8, holds.iter().map(|(near, _)| near), PATIENCE));
    assert!(
        one.reachable(address, 8, holds[..1].iter().map(|(near, _)| near), PATIENCE),
        "a group without the third"
    );
}

#[test]
fn many_segments_and_many_threads() {
    let (one, other, near, far) = linked(2048, 2048);
    std::thread::scope(|scope| {
        for (heap, hold, back) in
            [(&one, &near, &far), (&one, &near, &far), (&other, &far, &near), (&other, &far, &near)]
        {
            scope.spawn(move || {
                for round in 0..40usize {
                    let bytes = (1 + round % 3) * PAGE;
                    let held: Vec<u64> =
                        (0..5).map(|_| heap.allocate(bytes).expect("room")).collect();
                    for &address in &held {
                        assert!(reachable(heap, address, bytes, hold));
                        write(seen(back, heap, address), address);
                        assert_eq!(read(address), address);
                    }
                    held.iter().for_each(|&address| heap.release(address).expect("known"));
                }
            });
        }
    });
    assert!(one.is_empty() && other.is_empty());
    until("all was unmapped", || mapped(&near) + mapped(&far) == 0);
    assert!(!near.link().is_closed() && !far.link().is_closed());
}
