//! Frames of a rank of another node on a wire: no bytes may make a receiver panic, write outside a
//! receive's memory, or keep it busy forever.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use symm::coll::call::Span;
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::control::{ControlBlock, Identity, ParentGroup};
use symm::dtype::DType;
use symm::error::{Error, Result};
use symm::health::Health;
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::messages::links::Links;
use symm::messages::{InternodeLinks, Messages};
use symm::node_map::{NodeMap, RankLocation};
use symm::rank::Rank;
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::trace::GroupRecorder;
use symm::transport::{Buffer, GivenUp, Pending, Seat, Transport, Transports, Work};

const CANARY: u8 = 0xA5;
const ME: Rank = Rank(0);
const PEER: Rank = Rank(1);
/// Lengths of the receives: a message in one frame, and one that requests only its last chunk.
const WANTED: [usize; 2] = [64, (128 << 10) + 64];
/// Length of a frame's head.
const HEAD: usize = 48;

/// A connection that delivers the frames of the input, and then ends.
struct Fed {
    frames: Mutex<VecDeque<Vec<u8>>>,
    begun: Condvar,
    open: Mutex<bool>,
}

struct Connection(Arc<Fed>);

/// A receive of the next frame.
struct Receive {
    fed: Arc<Fed>,
    to: Span,
    _keep: Buffer,
}

impl Transports for Connection {
    fn connect(
        &self,
        _name: &str,
        _seat: &Seat,
        _timeout: Duration,
        _patient: bool,
        _given_up: &GivenUp,
    ) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self(Arc::clone(&self.0))))
    }

    fn allocate(&self, _device: i32, bytes: usize) -> Result<Buffer> {
        let mut memory = vec![0u8; bytes];
        Ok(Buffer { address: memory.as_mut_ptr().addr(), owner: Arc::new(memory), bytes })
    }
}

impl Transport for Connection {
    fn send(&self, _to: usize, from: Span, _tag: i32, keep: &Buffer) -> Result<Work> {
        Ok(Arc::new(Receive { fed: Arc::clone(&self.0), to: from, _keep: keep.clone() }))
    }

    fn recv(&self, _from: usize, to: Span, _tag: i32, keep: &Buffer) -> Result<Work> {
        Ok(Arc::new(Receive { fed: Arc::clone(&self.0), to, _keep: keep.clone() }))
    }
}

impl Pending for Receive {
    fn wait(&self, _limit: Duration) -> Result<bool> {
        // Frames arrive only after the receives were posted.
        drop(self.fed.begun.wait_while(self.fed.open.lock().unwrap(), |open| !*open).unwrap());
        let Some(mut frame) = self.fed.frames.lock().unwrap().pop_front() else { return Ok(false) };
        frame.resize(self.to.bytes, 0);
        // SAFETY: `_keep` owns this memory, which the link does not use before the receive ends.
        unsafe { std::ptr::copy_nonoverlapping(frame.as_ptr(), self.to.ptr(), frame.len()) };
        Ok(true)
    }

    fn abort(&self) -> Result<()> {
        Ok(())
    }
}

/// Returns the frames in `data`. Each starts with a byte, the number of 16-byte units after the
/// head; the head and these units follow.
fn frames(mut data: &[u8]) -> VecDeque<Vec<u8>> {
    let mut frames = VecDeque::new();
    while let Some((&units, rest)) = data.split_first() {
        let (frame, rest) = rest.split_at(rest.len().min(HEAD + 16 * usize::from(units)));
        frames.push_back(frame.to_vec());
        data = rest;
    }
    frames
}

fuzz_target!(|data: &[u8]| {
    let bytes = SegmentLayout::new(1).total_bytes();
    let segment = ShmSegment::map(ShmSegment::create(bytes).expect("a file"), bytes).expect("maps");
    let part = ParentGroup { node: "a".into(), ranks: vec![ME] };
    let members = vec![Identity { pid: std::process::id(), global: 0 }];
    let control =
        ControlBlock::new(segment, Rank(0), "fuzzed".into(), members, 0).named(Some(part));
    let node_map = Arc::new(NodeMap::of(&["a", "b"].map(RankLocation::on)));
    let store = Arc::new(MemoryStore::default());
    store.set("fuzz/0-1/here/1", b"1").expect("set");
    let fed = Arc::new(Fed {
        frames: Mutex::new(frames(data)),
        begun: Condvar::new(),
        open: Mutex::new(false),
    });
    let links =
        Arc::new(Links::new(Arc::new(Connection(Arc::clone(&fed))), Box::new(|_, _, _| {})));
    let control = Arc::new(control);
    let recorder = GroupRecorder::new(&control, Duration::from_secs(60));
    let health = Health::new(&control, &Arc::default(), &recorder);
    let messages = Messages::new(&health, false);
    messages.reach(InternodeLinks {
        links,
        store,
        node_map,
        me: ME,
        prefix: "fuzz/".into(),
        changed: Condvar::new(),
    });
    let mut memory = WANTED.map(|wanted| vec![CANARY; 3 * wanted]);
    for (tag, (memory, bytes)) in (0..).zip(memory.iter_mut().zip(WANTED)) {
        let span = Span { addr: memory.as_mut_ptr().addr() + bytes, bytes };
        // SAFETY: `memory` outlives `messages`, which ends every open message.
        let message = unsafe {
            Message::new(MessageSpec {
                peer: Some(PEER),
                tag,
                dtype: DType::U8,
                span,
                timeout: None,
            })
        };
        let _ = messages.recv(message, Duration::from_secs(60), Completion::new(|_, _| {}));
    }
    *fed.open.lock().unwrap() = true;
    fed.begun.notify_all();
    let begun = Instant::now();
    while !fed.frames.lock().unwrap().is_empty() && health.control().failure().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it stays for ever");
        std::thread::yield_now();
    }
    messages.shut_down(&Error::aborted("the input is over"), "");
    messages.stop();
    recorder.leave();
    for (memory, wanted) in memory.iter().zip(WANTED) {
        assert!(
            memory[..wanted].iter().chain(&memory[2 * wanted..]).all(|&byte| byte == CANARY),
            "written outside the receive"
        );
    }
});
