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
