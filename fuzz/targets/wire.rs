//! What a rank of another node says on a wire: no bytes may make a receiver panic, write outside a receive's memory, or stay for ever.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use symm::coll::call::Span;
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::control::{ControlBlock, Identity, Part};
use symm::dtype::DType;
use symm::error::{Error, Result};
use symm::health::Health;
use symm::host_map::{HostMap, Placement};
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::messages::links::{Links, Traffic};
use symm::messages::{Far, Messages};
use symm::rank::Rank;
use symm::store::Store;
use symm::store::memory::MemoryStore;
use symm::trace::GroupRecorder;

const CANARY: u8 = 0xA5;
const ME: Rank = Rank(0);
const PEER: Rank = Rank(1);
/// Bytes of the receives: a message in one frame, and one in pieces of which the last is requested.
const WANTED: [usize; 2] = [64, (128 << 10) + 64];
/// Length of a frame's head.
const HEAD: usize = 48;
/// Length of the longest frame.
const LONGEST: usize = HEAD + (256 << 10);

/// A link by which the frames of the input come. It ends with them.
struct Fed {
    frames: Mutex<VecDeque<Vec<u8>>>,
    arrived: [Mutex<Vec<u8>>; 2],
    begun: Condvar,
    open: Mutex<bool>,
}

impl Links for Fed {
    fn make(&self, _peer: Rank, _name: &str, _second: bool, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    fn send(&self, _peer: Rank, _frame: &[u8], _traffic: Traffic, _payload: &[u8]) -> Result<()> {
        Ok(())
    }

    fn confirm(&self, _peer: Rank, _sends: u64) {}

    fn listen(&self, _peer: Rank, _traffic: Traffic, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _peer: Rank, traffic: Traffic) -> Result<Option<usize>> {
        // Frames come once the receives are posted.
        drop(self.begun.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
        let Some(mut frame) = self.frames.lock().unwrap().pop_front() else { return Ok(None) };
        frame.resize(LONGEST, 0);
        let mut arrived = self.arrived[traffic as usize].lock().unwrap();
        *arrived = frame;
        Ok(Some(arrived.as_ptr().addr()))
    }

    fn release(&self, _peer: Rank, _traffic: Traffic) {}

    fn close(&self, _peer: Rank) {}
}

/// The frames in `data`: each a byte that says how many units of 16 bytes follow the head, the head, and these.
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
    let part = Part { host: "a".into(), ranks: vec![ME] };
    let members = vec![Identity { pid: std::process::id(), global: 0 }];
    let control = ControlBlock::new(segment, Rank(0), "fuzzed".into(), members, 0).named(Some(part));
    let layout = Arc::new(HostMap::of(&["a", "b"].map(Placement::on)));
    let store = Arc::new(MemoryStore::default());
    store.set("fuzz/0-1/here/1", b"1").expect("set");
    let (arrived, open) = (Default::default(), Mutex::new(false));
    let fed = Arc::new(Fed { frames: Mutex::new(frames(data)), arrived, begun: Condvar::new(), open });
    let links = Arc::clone(&fed) as Arc<dyn Links>;
    let control = Arc::new(control);
    let recorder = GroupRecorder::new(&control, Duration::from_secs(60));
    let health = Health::new(&control, &Arc::default(), &recorder);
    let messages = Messages::new(&health, false);
    messages.reach(Far { links, store, layout, me: ME, prefix: "fuzz/".into(), changed: Condvar::new() });
    let mut memory = WANTED.map(|wanted| vec![CANARY; 3 * wanted]);
    for (tag, (memory, bytes)) in (0..).zip(memory.iter_mut().zip(WANTED)) {
        let span = Span { addr: memory.as_mut_ptr().addr() + bytes, bytes };
        // SAFETY: `memory` outlives `messages`, which ends whatever is open.
        let message = unsafe { Message::new(MessageSpec { peer: Some(PEER), tag, dtype: DType::U8, span, timeout: None }) };
        let _ = messages.recv(message, Duration::from_secs(60), Completion::new(|_, _| {}));
    }
    *fed.open.lock().unwrap() = true;
    fed.begun.notify_all();
    let begun = Instant::now();
    while !fed.frames.lock().unwrap().is_empty() && health.control().failure().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it stays for ever");
        std::thread::yield_now();
    }
    messages.leave(&Error::aborted("the input is over"), "");
    messages.stop();
    recorder.leave();
    for (memory, wanted) in memory.iter().zip(WANTED) {
        assert!(memory[..wanted].iter().chain(&memory[2 * wanted..]).all(|&byte| byte == CANARY), "written outside the receive");
    }
});
