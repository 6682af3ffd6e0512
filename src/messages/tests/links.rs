//! Links, one of which is slow.

use super::PATIENCE;
use super::thread_wires::{Alike, Done};
use crate::coll::call::Span;
use crate::error::Result;
use crate::lock::lock;
use crate::messages::links::{Links, Traffic};
use crate::rank::Rank;
use crate::transport::{Buffer, Transport, Work};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// A transport whose `send` first reports on `there` that it was called, and then blocks until the
/// test permits it through `may`. Receives complete immediately.
#[derive(Clone)]
struct HeldUp {
    there: Sender<()>,
    may: Arc<Mutex<Receiver<()>>>,
}

impl Transport for HeldUp {
    fn send(&self, _to: usize, _from: Span, _tag: i32, _keep: &Buffer) -> Result<Work> {
        self.there.send(()).expect("the test waits for it");
        lock(&self.may).recv_timeout(PATIENCE).expect("it may begin");
        Ok(Arc::new(Done))
    }

    fn recv(&self, _from: usize, _to: Span, _tag: i32, _keep: &Buffer) -> Result<Work> {
        Ok(Arc::new(Done))
    }
}

#[test]
fn who_waits_on_a_link_passes_on_its_queue_which_a_flush_of_others_has_taken() {
    let ((there, arrives), (release, may)) = (channel(), channel());
    let transports = Alike(HeldUp { there, may: Arc::new(Mutex::new(may)) });
    let links = Links::new(Arc::new(transports), Box::new(|_, _, _| {}));
    for peer in [Rank(1), Rank(2)] {
        links.make(peer, "pair", false, PATIENCE).expect("made");
    }
    links.send(Rank(1), &[7], Traffic::Frame, &[]).expect("queued");
    links.listen(Rank(2), Traffic::Frame, 8).expect("queued");
    std::thread::scope(|scope| {
        // Both links have queued transfers; this thread flushes the second link after the first.
        let flush = scope.spawn(|| links.flush());
        arrives.recv_timeout(PATIENCE).expect("it is at the first link");
        let came = links.wait(Rank(2), Traffic::Frame).map(|came| came.map(|bytes| bytes.len()));
        release.send(()).expect("it waits");
        assert_eq!((came, flush.join().expect("no panic")), (Ok(Some(8)), vec![]));
    });
}
