use super::*;
use crate::coll::call::{Collective, Span};
use crate::coll::message::MessageSpec;
use crate::control::{Identity, ParentGroup};
use crate::dtype::{DType, ReduceOp};
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;
use serde_json::Value;

/// Makes a journal that only this test uses.
fn journal() -> &'static FlightRecorder {
    Box::leak(Box::new(FlightRecorder::new(false)))
}

/// Makes the control block of rank 1 of 3.
fn control(name: &str) -> Arc<ControlBlock> {
    Arc::new(block(name))
}

/// Makes the control block of the second rank of node "b", which has ranks 2, 4 and 5 of a group
/// of 6.
fn control_of_node(name: &str) -> Arc<ControlBlock> {
    let ranks = [2, 4, 5].map(Rank).to_vec();
    let global_ranks = vec![6, 7, 10, 8, 11, 12];
    Arc::new(block(name).named(Some(ParentGroup { node: "b".into(), ranks, global_ranks })))
}

fn block(name: &str) -> ControlBlock {
    let bytes = SegmentLayout::new(3).total_bytes();
    let segment = ShmSegment::map(ShmSegment::create(bytes).expect("memfd"), bytes).expect("map");
    let members =
        (0..3).map(|rank| Identity { pid: std::process::id(), global: 10 + rank }).collect();
    ControlBlock::new(segment, Rank(1), name.into(), members, 1)
}

fn call(op: Collective, bytes: usize) -> Call<'static> {
    let span = vec![Span { addr: 0, bytes }];
    let (dtype, reduce_op, root) = (DType::F32, ReduceOp::Max, Rank(2));
    let (inputs, outputs) = (span.clone().into(), span.into());
    let spec = CallSpec { op, dtype, reduce_op, root, inputs, outputs, ..CallSpec::barrier(None) };
    Call::inner(spec)
}

fn rendered(journal: &FlightRecorder) -> Value {
    serde_json::from_str(&dump::render(journal).expect("renders")).expect("JSON")
}

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn a_dump_tells_each_calls_story() {
    let (journal, control) = (journal(), control("a \"group\""));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    let done = recorder.begin(&call(Collective::AllReduce, 4096), LIMIT, 1);
    recorder.end(done, &Ok(()), true, "inline");
    let failed = recorder.begin(&call(Collective::Broadcast, 8), LIMIT, 2);
    recorder.end(failed, &Err(Error::mismatch("no")), true, "");
    let refused = recorder.begin(&call(Collective::Barrier, 0), LIMIT, 3);
    recorder.end(refused, &Err(Error::peer("no")), false, "");
    let queued = recorder.schedule(
        &[call(Collective::AllGather, 4), call(Collective::AllToAll, 4)],
        LIMIT,
        true,
        CallTarget::Cpu,
    );
    recorder.start(queued, 3);
    recorder.abandon(queued..queued + 2, &Error::timeout("no"));
    let place = CallTarget::Cuda { device: 1, stream: 77, background: true };
    let launched = recorder.schedule(&[call(Collective::Reduce, 4)], LIMIT, true, place);
    recorder.start_child(launched, 1, "reduce_staged");
    let span = Span { addr: 0, bytes: 12 };
    let message =
        Message::of(MessageSpec { peer: None, tag: 5, dtype: DType::I32, span, timeout: None });
    let received = recorder.message(false, &message, LIMIT, CallTarget::Cpu, false);
    recorder.ended(received, &Ok(()), Some(Rank(2)));

    let dump = rendered(journal);
    assert_eq!(
        (&dump["format"], &dump["version"], &dump["calls_made"]),
        (&"torch-symm trace".into(), &1.into(), &7.into())
    );
    assert_eq!(dump["pid"], std::process::id());
    let group = &dump["groups"][0];
    assert_eq!(
        (&group["name"], &group["rank"], &group["timeout_ms"]),
        (&"a \"group\"".into(), &1.into(), &30_000.into())
    );
    assert_eq!(group["memory"], control.segment().identity());
    assert_eq!(
        (&group["members"][2]["global_rank"], &group["failure"]),
        (&12.into(), &Value::Null)
    );
    assert_eq!(group["peers"].as_array().map(Vec::len), Some(3));
    let calls = dump["calls"].as_array().expect("a list");
    let seen = |field: &str| calls.iter().map(|call| call[field].clone()).collect::<Vec<_>>();
    assert_eq!(
        seen("op"),
        ["all_reduce", "broadcast", "barrier", "all_gather", "all_to_all", "reduce", "recv"]
    );
    assert_eq!(
        seen("state"),
        ["completed", "failed", "failed", "started", "failed", "started", "completed"]
    );
    let sequences = [Some(1), Some(2), None, Some(3), None, Some(1), Some(1)];
    assert_eq!(seen("sequence"), sequences.map(Value::from));
    assert_eq!(
        (&calls[0]["call"], &calls[0]["root"]),
        (&"all_reduce(1024 × float32, 4096 bytes, MAX)".into(), &Value::Null)
    );
    assert_eq!((&calls[1]["outcome"], &calls[1]["root"]), (&"SymmMismatchError".into(), &2.into()));
    assert_eq!(
        (&calls[5]["device"], &calls[5]["stream"], &calls[0]["device"]),
        (&"cuda:1".into(), &77.into(), &"cpu".into())
    );
    assert_eq!(
        (&calls[6]["peer"], &calls[6]["tag"], &calls[6]["elements"]),
        (&2.into(), &5.into(), &3.into())
    );
    assert_eq!((&calls[0]["algorithm"], &calls[1]["algorithm"]), (&"inline".into(), &Value::Null));
    assert_eq!(
        (&calls[5]["algorithm"], &calls[0]["waited_ns"]),
        (&"reduce_staged".into(), &Value::Null),
        "nobody watches"
    );
    let times = |index: usize| {
        ["created_ns", "started_ns", "ended_ns"].map(|field| calls[index][field].as_u64())
    };
    let [created, started, ended] = times(0);
    assert!(created.is_some() && created == started && ended > started, "{:?}", times(0));
    assert!(
        times(4)[0].is_some() && times(4)[1].is_none() && times(4)[2].is_some(),
        "{:?}",
        times(4)
    );
}

#[test]
fn all_calls_are_counted_by_operation_and_size() {
    let (journal, control) = (&*Box::leak(Box::new(FlightRecorder::new(true))), control("counted"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    let calls = KEPT as u64 + 10;
    for sequence in 1..=calls {
        let number = recorder.begin(&call(Collective::AllReduce, 4096), LIMIT, sequence);
        recorder.end(number, &Ok(()), true, "inline");
    }
    // More calls than the recorder keeps are scheduled before the first of them ends, so its entry
    // is overwritten. Its time is then unknown, but the call is counted.
    let queued = recorder.schedule(
        &vec![call(Collective::Gather, 1000); KEPT + 5],
        LIMIT,
        true,
        CallTarget::Cpu,
    );
    recorder.start(queued, 1);
    recorder.end(queued, &Ok(()), true, "inline");
    recorder.start(queued + KEPT as u64, 2);
    recorder.end(queued + KEPT as u64, &Err(Error::mismatch("no")), true, "");
    let place = CallTarget::Cuda { device: 0, stream: 1, background: false };
    recorder.schedule(&[call(Collective::AllReduce, 4096)], LIMIT, false, place);
    let span = Span { addr: 0, bytes: 12 };
    let message = Message::of(MessageSpec {
        peer: Some(Rank(0)),
        tag: 5,
        dtype: DType::I32,
        span,
        timeout: None,
    });
    recorder.ended(recorder.message(true, &message, LIMIT, CallTarget::Cpu, false), &Ok(()), None);

    let totals = &rendered(journal)["totals"];
    assert!(totals["since_ns"].as_u64().is_some());
    let lines = totals["lines"].as_array().expect("a list");
    let seen: Vec<_> = lines
        .iter()
        .map(|line| (line["op"].as_str(), line["device"].as_str(), line["size"].as_u64()))
        .collect();
    let expected = [
        ("all_reduce", "cpu", 4096),
        ("all_reduce", "cuda", 4096),
        ("gather", "cpu", 4096),
        ("send", "cpu", 16),
    ];
    assert_eq!(seen, expected.map(|(op, device, size)| (Some(op), Some(device), Some(size))));
    let counts = |line: &Value| {
        ["calls", "bytes", "timed"].map(|field| line[field].as_u64().expect("a number"))
    };
    assert_eq!(counts(&lines[0]), [calls, 4096 * calls, calls]);
    assert_eq!(counts(&lines[1]), [1, 4096, 0], "no GPU tells when it has ended");
    let gathers = KEPT as u64 + 5;
    assert_eq!(
        counts(&lines[2]),
        [gathers, 3000 * gathers, 0],
        "the first entry was overwritten, another has failed"
    );
    assert_eq!(counts(&lines[3]), [1, 12, 1]);
    let (spent, longest) = (lines[0]["ns"].as_u64(), lines[0]["longest_ns"].as_u64());
    assert!(longest <= spent && longest > Some(0), "{longest:?} of {spent:?}");
    assert_eq!(rendered(self::journal())["totals"], Value::Null);
}

#[test]
fn who_was_waited_for_is_noted_where_a_profiler_watches() {
    let (journal, control) = (journal(), control("watched"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    let run = |sequence: u64, peers: [u64; 2]| {
        let number = recorder.begin(&call(Collective::AllReduce, 4), LIMIT, sequence);
        let own = control.start(Rank(1), sequence).load(Ordering::Relaxed);
        for (rank, late) in [Rank(0), Rank(2)].into_iter().zip(peers) {
            control.start(rank, sequence).store(own + late, Ordering::Relaxed);
        }
        while clock::now() < own + 2000 {}
        recorder.end(number, &Ok(()), true, "inline");
    };
    run(1, [500, 1000]);
    recorder.watch(true);
    run(2, [500, 1000]);
    run(3, [0, 0]);
    run(4, [u64::MAX / 2, 7]);
    recorder.watch(false);
    run(5, [500, 1000]);
    let dump = rendered(journal);
    let calls = dump["calls"].as_array().expect("a list");
    let seen =
        |index: usize| (calls[index]["waited_ns"].as_u64(), calls[index]["waited_for"].as_u64());
    assert_eq!(
        (seen(0), seen(1), seen(2), seen(4)),
        ((None, None), (Some(1000), Some(2)), (Some(0), None), (None, None))
    );
    let took = calls[3]["ended_ns"]
        .as_u64()
        .zip(calls[3]["started_ns"].as_u64())
        .map(|(ended, started)| ended - started);
    assert_eq!(seen(3), (took, Some(0)), "no longer than the call, whatever a peer says");
}

#[test]
fn a_failure_is_kept_with_what_was_known_of_the_peers() {
    let (journal, control) = (journal(), control("failing"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    recorder.note_failure(&Error::timeout("this call alone"));
    recorder.note_failure(&control.fail(Error::aborted("by this rank")));
    assert_eq!(
        rendered(journal)["groups"][0]["failure"],
        Value::Null,
        "neither fails the group for others to explain"
    );

    let control = self::control("failing");
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    control.note_exit(Rank(2), "has ended (killed by signal 9 (SIGKILL))".into());
    control.begin(41, Collective::AllReduce);
    recorder.note_failure(&control.fail(Error::peer("rank 2 has ended")));
    control.begin(42, Collective::AllReduce);
    recorder.note_failure(&Error::peer("a later one"));
    let failures = || crate::lock::lock(&journal.groups).peer_failures();
    let known = ("failing".to_owned(), vec![10, 11, 12], Error::peer("rank 2 has ended"));
    assert_eq!(failures(), [known]);
    let dump = rendered(journal);
    let group = &dump["groups"][1];
    assert_eq!(
        (&group["failure"]["kind"], &group["failure"]["message"]),
        (&"SymmPeerError".into(), &"rank 2 has ended".into())
    );
    assert_eq!((&group["peers"][1]["begun"], &group["begun"]), (&41.into(), &42.into()));
    assert_eq!(group["peers"][2]["absence"], "has ended (killed by signal 9 (SIGKILL))");
    assert_eq!(group["peers"][0]["absence"], Value::Null);
}

#[test]
fn ranks_of_several_nodes_have_their_numbers_in_the_group() {
    let (journal, control) = (journal(), control_of_node("large"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    // A dump may be written before the other nodes have been reached.
    let group = &rendered(journal)["groups"][0];
    assert_eq!((&group["rank"], &group["world"]), (&4.into(), &6.into()));
    recorder.note_nodes(77, "node \"a\" (ranks 0, 1 and 3)".into());
    let span = Span { addr: 0, bytes: 4 };
    let message = |peer| {
        let peer = Some(Rank(peer));
        Message::of(MessageSpec { peer, tag: 5, dtype: DType::I32, span, timeout: None })
    };
    // The peers are local rank 2 and global rank 8.
    recorder.message(true, &message(2), LIMIT, CallTarget::Cpu, false);
    recorder.message(true, &message(8), LIMIT, CallTarget::Cpu, true);
    let dump = rendered(journal);
    let group = &dump["groups"][0];
    assert_eq!(
        (&group["rank"], &group["world"], &group["memory"]),
        (&4.into(), &6.into(), &77.into())
    );
    assert_eq!(group["global_ranks"], Value::from(vec![6, 7, 10, 8, 11, 12]));
    for listed in ["members", "peers"] {
        let ranks: Vec<_> = (0..3).map(|at| &group[listed][at]["rank"]).collect();
        assert_eq!(ranks, [2, 4, 5], "{listed}");
    }
    assert_eq!((&dump["calls"][0]["peer"], &dump["calls"][1]["peer"]), (&5.into(), &8.into()));
}

#[test]
fn a_new_timeout_is_recorded() {
    let (journal, control) = (journal(), control("patient"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    recorder.set_timeout(Duration::from_secs(600));
    assert_eq!(rendered(journal)["groups"][0]["timeout_ms"], 600_000);
}

#[test]
fn only_a_call_on_cpu_tensors_shows_the_nodes_that_are_late_for_it() {
    let (journal, control) = (journal(), control_of_node("large"));
    let recorder = GroupRecorder::in_journal(journal, &control, LIMIT);
    recorder.note_nodes(77, "all others".into());
    let cuda = CallTarget::Cuda { device: 0, stream: 7, background: false };
    let running = InternodePhase::Running(Some(0));
    for (place, phase) in [(CallTarget::Cpu, InternodePhase::Rail(0)), (cuda, running)] {
        let number = recorder.schedule(&[call(Collective::AllReduce, 4)], LIMIT, false, place);
        recorder.start(number, 1);
        recorder.phase(number, phase);
    }
    recorder.note_late(1, "node \"c\"".into());
    let dump = rendered(journal);
    assert_eq!(dump["calls"][0]["phase"], "rail 0, waiting for node \"c\"");
    let phase = "begun on the GPU, inside the node or on rail 0 with all others";
    assert_eq!(dump["calls"][1]["phase"], phase);
}

#[test]
fn groups_that_were_left_are_forgotten_in_their_order() {
    let journal = journal();
    let kept = GroupRecorder::in_journal(journal, &control("open"), LIMIT);
    for number in 0..100 {
        let recorder = GroupRecorder::in_journal(journal, &control(&number.to_string()), LIMIT);
        recorder.begin(&call(Collective::Barrier, 0), LIMIT, 1);
        recorder.leave();
        recorder.leave();
    }
    kept.begin(&call(Collective::Barrier, 0), LIMIT, 1);
    let dump = rendered(journal);
    let names: Vec<&str> = dump["groups"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|group| group["name"].as_str())
        .collect();
    assert_eq!((names.len(), names[0], names[1], names[64]), (65, "open", "36", "99"));
    assert_eq!(
        dump["calls"].as_array().map(Vec::len),
        Some(65),
        "those of forgotten groups are not shown"
    );
}
