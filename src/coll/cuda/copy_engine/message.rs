//! Long messages between two ranks. Only the two ends know of a message.
//!
//! The ends count the steps of their messages in words of their own (`MessageWords` in
//! `copy_words.cuh`), two for each message:
//! - direct: the end that launches later knows the tensor of the other one, and moves the bytes
//!   (`docs/design/copy-engine.md`). Step 1 says that the other end is ready, step 2 that the bytes
//!   have moved.
//! - by a kernel with lanes: step 2 says that an end has arrived, and the other one may wait for it
//!   before it starts the kernel.

use super::{CopyTasks, Task};
use crate::coll::call::Span;
use crate::coll::cuda::arguments::{ArgBytes, MessageSyncArgs};
use crate::coll::cuda::kernel_spec::MESSAGE_SYNC;
use crate::coll::cuda::launch::{Launch, LaunchContext};
use crate::kernels::cuda::driver::Grid;

/// Number of steps of a message; `MESSAGE_STEPS` in `copy_words.cuh`.
const STEPS: u32 = 2;

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageEnd {
    /// True for the sender's end.
    pub send: bool,
    /// The rank at the other end.
    pub peer: usize,
    /// The message, or its destination.
    pub span: Span,
}

/// Which end of a direct message moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageMover {
    /// The other end.
    Peer,
    /// This end, from or to the other end's tensor, which is at this address.
    Here(u64),
}

impl CopyTasks<'_> {
    /// Returns the tasks of one end of a direct message, all for one stream.
    pub fn message(mut self, end: MessageEnd, mover: MessageMover) -> Vec<Task> {
        match mover {
            MessageMover::Peer => {
                self.sync_end(end, MessageSyncArgs { post: 1, ..last(STEPS) });
            }
            MessageMover::Here(other) => {
                self.sync_end(end, MessageSyncArgs { wait: 1, ..Default::default() });
                let (own, bytes) = (end.span.addr as u64, end.span.bytes);
                if end.send {
                    // A copy engine would write to the receiver's tensor even after a timeout.
                    self.push(other, own, bytes);
                } else {
                    self.copy(false, own, other, bytes);
                }
                self.sync_end(end, MessageSyncArgs { post: STEPS, ..last(0) });
            }
        }
        self.tasks
    }

    fn sync_end(&mut self, end: MessageEnd, args: MessageSyncArgs) {
        self.tasks.push(Task::Kernel { side: false, launch: sync(self.context, end, args) });
    }
}

/// Returns the kernel that announces this rank to the other end of a message, which a kernel then
/// moves, and waits for the other end.
pub fn arrival(context: &LaunchContext<'_>, end: MessageEnd) -> Launch {
    sync(context, end, MessageSyncArgs { post: STEPS, bare: 1, ..last(STEPS) })
}

/// Arguments of the last kernel of a message, which waits for step `wait`.
fn last(wait: u32) -> MessageSyncArgs {
    MessageSyncArgs { wait, advance: STEPS, ..Default::default() }
}

fn sync(context: &LaunchContext<'_>, end: MessageEnd, args: MessageSyncArgs) -> Launch {
    let words = |send| context.layout.message_words(send) as u64;
    let args = MessageSyncArgs {
        common: context.common,
        own: words(end.send),
        other: words(!end.send),
        rank: end.peer as u32,
        ..args
    };
    let grid = Grid::new(1, 1);
    Launch { kernel: &MESSAGE_SYNC, grid, zero_copy: false, args: ArgBytes::of(&args) }
}
