//! Ranks as threads of one process.

mod nodes;

use super::*;
use crate::coll::call::{CallSpec, Collective, Span};
use crate::coll::message::MessageSpec;
use crate::control::Identity;
use crate::dtype::DType;
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;

/// Runs `body` on `n` ranks in threads of this process.
fn with_ranks(n: u32, body: impl Fn(Group, u32) + Sync) {
    let bytes = SegmentLayout::new(n as usize).total_bytes();
    let file = ShmSegment::create(bytes).expect("memfd");
    std::thread::scope(|scope| {
        for rank in 0..n {
            let (file, body) = (file.try_clone().expect("dup"), &body);
            scope.spawn(move || {
                let segment = ShmSegment::map(file, bytes).expect("map");
                let members =
                    (0..n).map(|global| Identity { pid: std::process::id(), global }).collect();
                body(
                    Group::from_joined(
                        segment,
                        "test",
                        Rank(rank),
                        members,
                        Duration::from_secs(20),
                        GroupTuning::default(),
                    )
                    .expect("assemble"),
                    rank,
                );
            });
        }
    });
}

fn span<T>(slice: &mut [T]) -> Span {
    Span { addr: slice.as_mut_ptr() as usize, bytes: size_of_val(slice) }
}

fn call(op: Collective, inputs: Vec<Span>, outputs: Vec<Span>) -> Call<'static> {
    let (inputs, outputs) = (inputs.into(), outputs.into());
    Call::inner(CallSpec { op, dtype: DType::I32, inputs, outputs, ..CallSpec::barrier(None) })
}

// proves P23
#[test]
fn a_panic_of_one_rank_fails_the_group_for_all() {
    let inside = |group: &Group| {
        // More lengths than a post has room for, which `validate` would have refused.
        let many = vec![Span { addr: 0, bytes: 0 }; 100_000];
        group.queue.run(&[call(Collective::AllGather, vec![], many)], Duration::from_secs(20))
    };
    let outside = |group: &Group| group.catch_panic(|| panic!("on purpose"));
    for break_down in [&inside as &(dyn Fn(&Group) -> Result<()> + Sync), &outside] {
        with_ranks(2, |group, rank| {
            let since = Instant::now();
            let own = vec![call(Collective::Barrier, vec![], vec![])];
            let error = if rank == 1 { break_down(&group) } else { group.run(&own, None) }
                .expect_err("it panicked");
            assert_eq!(error.kind, crate::error::ErrorKind::Internal, "{error}");
            assert!(
                error.message.starts_with("rank 1 (pid ")
                    && error.message.contains("a bug in torch-symm: panic: "),
                "{error}"
            );
            assert!(since.elapsed() < Duration::from_secs(5), "not at the deadline");
            let again =
                group.run(&[call(Collective::Barrier, vec![], vec![])], None).expect_err("dead");
            assert_eq!(again.message, error.message, "the first cause stands");
        });
    }
}

#[test]
fn a_rank_that_has_left_moves_no_messages() {
    with_ranks(2, |group, rank| {
        let mut data = [rank; 2];
        let mut message = || {
            Message::of(MessageSpec {
                peer: Some(Rank(1 - rank)),
                tag: 3,
                dtype: DType::I32,
                span: span(&mut data),
                timeout: None,
            })
        };
        let done = || Completion::new(|outcome, _| outcome.expect("transfer"));
        let ticket =
            if rank == 0 { group.send(message(), done()) } else { group.recv(message(), done()) }
                .expect("begun");
        group.wait(ticket, None).expect("within its time");
        group.shutdown();
        // The group's memory, which held the rings, is private now.
        group.progress();
        assert_eq!(group.failure(), None);
    });
}

// proves P10 on CUDA
#[test]
fn leaving_ends_a_set_up_of_gpus_that_waits_for_peers() {
    let over = std::sync::Barrier::new(2);
    with_ranks(2, |group, rank| {
        if rank == 0 {
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| group.connect(0));
                std::thread::sleep(Duration::from_millis(50));
                let begun = Instant::now();
                assert_eq!(group.failure(), None);
                group.shutdown();
                assert!(waiting.join().expect("no panic").is_err());
                assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
            });
        }
        over.wait();
    });
}

#[test]
fn an_asynchronous_call_needs_nobody_who_waits() {
    with_ranks(2, |group, _| {
        let submit = |done| {
            group.submit(&[call(Collective::Barrier, vec![], vec![])], None, done).expect("queued")
        };
        // This thread waits for each call at once. After 20 such calls, a worker leaves the next
        // call to its submitter for a while.
        for _ in 0..20 {
            group
                .wait(submit(Completion::new(|outcome, _| outcome.expect("a barrier"))), None)
                .expect("done");
        }
        for limit in [None, Some(Duration::from_secs(20))] {
            let (reported, hears) = std::sync::mpsc::channel();
            let ticket = submit(Completion::new(move |outcome, _| {
                reported.send(outcome).expect("received")
            }));
            if limit.is_some() {
                group.wait(ticket, limit).expect("done");
            }
            assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(Ok(())), "{limit:?}");
        }
    });
}

/// Submits a sum of `data` in place, whose outcome goes to the receiver.
fn submit_sum(group: &Group, data: &mut [i32]) -> (u64, std::sync::mpsc::Receiver<Result<()>>) {
    let (reported, hears) = std::sync::mpsc::channel();
    let completion = Completion::new(move |outcome, _| drop(reported.send(outcome)));
    let ticket = group
        .submit(
            &[call(Collective::AllReduce, vec![span(data)], vec![span(data)])],
            None,
            completion,
        )
        .expect("queued");
    (ticket, hears)
}

const LONG: usize = 100_000;

#[test]
fn calls_that_were_posted_keep_their_order_with_all_others() {
    with_ranks(2, |group, _| {
        for (first, second) in [(10, 10), (10, LONG), (LONG, 10)] {
            for waits in [&[0usize, 1, 2][..], &[2, 1, 0], &[2], &[]] {
                // The same elements in every call: each needs the result of the one before.
                let mut data = vec![1i32; first.max(second)];
                let jobs =
                    [first, second, first].map(|length| submit_sum(&group, &mut data[..length]));
                for &job in waits {
                    group.wait(jobs[job].0, None).expect("done");
                }
                let all = span(&mut data[..first.min(second)]);
                group
                    .run(&[call(Collective::AllReduce, vec![all], vec![all])], None)
                    .expect("behind them");
                assert!(
                    jobs.iter().all(|(_, hears)| {
                        hears.recv_timeout(Duration::from_secs(20)) == Ok(Ok(()))
                    }),
                    "{first} {second} {waits:?}"
                );
                let expected = |i: usize| {
                    1 << (2 * i32::from(i < first)
                        + i32::from(i < second)
                        + i32::from(i < first.min(second)))
                };
                assert!(
                    data.iter().enumerate().all(|(i, &value)| value == expected(i)),
                    "{first} {second} {waits:?}"
                );
            }
        }
    });
}

#[test]
fn a_posted_call_that_nobody_awaits_is_finished_when_it_is_asked_for_and_when_its_rank_leaves() {
    with_ranks(2, |group, _| {
        for asks in [true, false] {
            let mut data = vec![1i32; 10];
            let (_, hears) = submit_sum(&group, &mut data);
            if asks {
                group.progress();
            } else {
                group.shutdown();
            }
            assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(Ok(())), "{asks}");
            assert_eq!(data, vec![2; 10], "{asks}");
        }
    });
}

#[test]
fn a_posted_call_whose_peer_leaves_or_gives_up_fails_when_it_is_awaited() {
    for aborts in [false, true] {
        let posted = std::sync::Barrier::new(2);
        with_ranks(2, |group, rank| {
            let mut data = vec![1i32; 10];
            if rank == 0 {
                let (ticket, hears) = submit_sum(&group, &mut data);
                posted.wait();
                group.wait(ticket, None).expect("the outcome goes to the completion");
                let error =
                    hears.try_recv().expect("it has ended").expect_err("rank 1 does not come");
                assert!(error.message.contains("rank 1 (pid "), "{error}");
                assert_eq!(data, vec![1; 10], "nothing was written");
                assert_eq!(
                    group.run(&[call(Collective::Barrier, vec![], vec![])], None),
                    Err(group.failure().expect("it failed"))
                );
            } else {
                posted.wait();
                if aborts {
                    group.abort();
                }
            }
        });
    }
}

#[test]
fn a_limited_wait_for_a_posted_call_gives_up_and_leaves_it_alone() {
    let tried = std::sync::Barrier::new(2);
    with_ranks(2, |group, rank| {
        let mut data = vec![1i32; 10];
        let limit = Duration::from_millis(20);
        if rank == 0 {
            let (ticket, hears) = submit_sum(&group, &mut data);
            let error = group.wait(ticket, Some(limit)).expect_err("rank 1 has not come");
            assert_eq!(error.kind, crate::error::ErrorKind::WaitTimeout, "{error}");
            tried.wait();
            group.wait(ticket, Some(Duration::from_secs(20))).expect("it came");
            assert_eq!(hears.try_recv(), Ok(Ok(())));
        } else {
            tried.wait();
            let (ticket, _hears) = submit_sum(&group, &mut data);
            group.wait(ticket, None).expect("rank 0 has come");
        }
        assert_eq!(data, vec![2; 10]);
    });
}
