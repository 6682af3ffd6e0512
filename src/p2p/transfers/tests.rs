//! What one connection learns, others do not.

use super::*;
use crate::control::Identity;
use crate::dtype::DType;
use crate::mem::layout::Layout;
use crate::mem::shm::Segment;

/// No process has it: what is read of it fails.
const NOBODY: u32 = i32::MAX as u32;
const PATIENCE: Duration = Duration::from_secs(10);

/// Three ranks of this process, of which rank 0 takes rank 1 for one whose memory it cannot read.
fn ranks() -> Vec<Arc<Transfers>> {
    let bytes = Layout::new(3).total_bytes();
    let file = Segment::create(bytes).expect("memfd");
    let rank = |rank| {
        let segment = Segment::map(file.try_clone().expect("dup"), bytes).expect("map");
        let pid = |peer| if rank == 0 && peer == 1 { NOBODY } else { std::process::id() };
        let members = (0..3).map(|global| Identity { pid: pid(global), global }).collect();
        Transfers::new(Arc::new(ControlBlock::new(segment, Rank(rank), "test".into(), members, 1)), true)
    };
    (0..3).map(rank).collect()
}

fn message(peer: Rank, span: Span) -> Message {
    Message { peer: Some(peer), tag: 3, dtype: DType::U8, span, timeout: None }
}

#[test]
fn a_peer_that_cannot_be_read_is_not_tried_again_and_others_are_read() {
    let ranks = ranks();
    let readable = || [1, 2].map(|peer: usize| ranks[0].lock().connections[peer].is_readable());
    for (peer, value, expected) in [(2, 7u8, [true, true]), (1, 8, [false, true]), (2, 9, [false, true]), (1, 10, [false, true])] {
        let (mut from, mut to) = (vec![value; EAGER_BYTES + 1], vec![0u8; EAGER_BYTES + 1]);
        let [source, target] = [&mut from, &mut to].map(|bytes| Span { addr: bytes.as_mut_ptr() as usize, bytes: bytes.len() });
        let quiet = || Completion::new(|_, _| {});
        let sent = ranks[peer].send(message(Rank(0), source), PATIENCE, quiet()).expect("begun");
        // Nobody attends to it, so that its receiver would read it.
        let received = ranks[0].recv(message(Rank(peer as u32), target), PATIENCE, quiet()).expect("begun");
        ranks[0].wait(received, None).expect("within its time");
        ranks[peer].wait(sent, None).expect("within its time");
        assert_eq!((to, readable()), (from, expected), "{value} from rank {peer}");
    }
    ranks.iter().for_each(|rank| rank.stop());
}

#[test]
fn a_receive_has_its_time_from_when_it_was_begun_whatever_the_progress_thread_does() {
    let ranks = ranks();
    let (mut sent, mut came, mut missing) = ([1u8], [0u8], [0u8]);
    let [sent, came, missing] = [&mut sent, &mut came, &mut missing].map(|bytes| Span { addr: bytes.as_mut_ptr() as usize, bytes: 1 });
    // The progress thread completes the first receive, which takes longer than the second may.
    let limit = Duration::from_secs(1);
    let (entered, inside) = std::sync::mpsc::channel();
    let slow = Completion::new(move |_, _| {
        entered.send(()).expect("waited for");
        std::thread::sleep(3 * limit / 2);
    });
    ranks[0].recv(message(Rank(2), came), PATIENCE, slow).expect("begun");
    ranks[2].send(message(Rank(0), sent), PATIENCE, Completion::new(|_, _| {})).expect("begun");
    inside.recv_timeout(PATIENCE).expect("a thread completes it");
    let (tell, told) = std::sync::mpsc::channel();
    let begun = Instant::now();
    let tag = Message { tag: 4, ..message(Rank(2), missing) };
    ranks[0].recv(tag, limit, Completion::new(move |outcome, _| tell.send(outcome).expect("waited for"))).expect("begun");
    let error = told.recv_timeout(PATIENCE).expect("completed").expect_err("nobody sends it");
    let waited = begun.elapsed();
    assert!(error.message.contains("waited") && waited < 9 * limit / 4, "{waited:?}: {error}");
    ranks.iter().for_each(|rank| rank.stop());
}
