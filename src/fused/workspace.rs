//! Which piece of its workspace a call uses, and when that piece may be written again.
//!
//! Peers may read a rank's piece until they finish the call. In each call every rank receives a
//! signal from every peer. A rank sends its signals after its reads of earlier calls, because both
//! of its streams join at the end of a call. So a rank that has completed a call knows that all
//! peers have finished reading for every call *before* it. It is enough that two consecutive calls
//! use different pieces, without a barrier at the end: call k may overwrite the piece of call
//! k - 2, because call k - 1 has completed on this stream.
//!
//! A graph breaks "consecutive": it may be replayed after itself, after another graph, or between
//! eager calls, and the host does not see it. So recorded calls have two pieces of their own, and
//! the first call of each capture starts with a barrier of all ranks, after which no peer reads
//! anything older. Eager calls alternate between the other two pieces, which no graph uses. A large
//! workspace has one piece, and each call starts with the barrier. So does the call after a failed
//! one, in which a rank may not have received a signal from every peer.
//!
//! `fused::happens_before` checks this for whole programs, `tests/loom.rs` over memory.

use crate::error::{Error, Result};

/// Sizes of pieces are rounded up to a multiple of this, so that a slightly larger call does not
/// need a new workspace.
const GRAIN: usize = 2 << 20;
/// A workspace has one piece if the piece is larger than this: the barrier is short compared with
/// such a call.
const MANY_PIECES: usize = 64 << 20;

/// The part of a workspace that one call uses; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceSlot {
    /// Offset of the piece in bytes.
    pub offset: usize,
    /// True if the call must not write before all ranks have entered it.
    pub entry: bool,
}

/// The memory that all ranks must create in a rendezvous before a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRequest {
    /// Length in bytes, the same on all ranks.
    pub bytes: usize,
    /// True if graphs use the previous memory, which must then be kept.
    pub keep: bool,
    piece: usize,
    pieces: usize,
}

/// The answer to a call that starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStart {
    /// The call may use this piece.
    Turn(WorkspaceSlot),
    /// The caller may retry once this memory exists and it has called [`Workspace::made`].
    Make(MemoryRequest),
}

/// The state that assigns pieces to a group's fused products on one device. Every rank makes the
/// same calls in the same order, so all ranks choose the same pieces.
#[derive(Clone, Debug)]
pub struct Workspace {
    on_host: bool,
    piece: usize,
    pieces: usize,
    eager: usize,
    recorded: usize,
    /// Number of the last capture; 0 if there has not been one.
    capture: u64,
    /// True if graphs use the memory.
    in_graphs: bool,
    failed: bool,
}

impl Workspace {
    /// A workspace without memory.
    pub fn new(on_host: bool) -> Self {
        Self {
            on_host,
            piece: 0,
            pieces: 0,
            eager: 0,
            recorded: 0,
            capture: 0,
            in_graphs: false,
            failed: false,
        }
    }

    /// Starts a call that needs `bytes` on each rank, the same number on all. `capture` is the
    /// number of the capture that records it, or 0. Errors name `who`.
    ///
    /// # Errors
    /// [`Internal`](crate::error::ErrorKind::Internal) if the workspace is too small while a graph
    /// is recorded; [`Value`](crate::error::ErrorKind::Value) if the size overflows.
    pub fn begin(&mut self, who: &str, bytes: usize, capture: u64) -> Result<CallStart> {
        if bytes > self.piece {
            return self.more(who, bytes, capture).map(CallStart::Make);
        }
        let recorded = capture != 0;
        self.in_graphs |= recorded;
        let first = recorded && std::mem::replace(&mut self.capture, capture) != capture;
        let entry = self.failed || first || self.pieces == 1;
        // The barrier of a recorded call runs only when its graph is replayed.
        self.failed &= recorded;
        let (calls, own) = if recorded { (&mut self.recorded, 2) } else { (&mut self.eager, 0) };
        *calls += 1;
        let piece = if self.pieces == 1 { 0 } else { own + *calls % 2 };
        Ok(CallStart::Turn(WorkspaceSlot { offset: piece * self.piece, entry }))
    }

    fn more(&self, who: &str, bytes: usize, capture: u64) -> Result<MemoryRequest> {
        if capture != 0 {
            return Err(Error::internal(format!(
                "{who} has {} bytes of workspace and needs {bytes}, which cannot be made while a \
                 graph is recorded; \
                 call it once with these shapes before",
                self.piece
            )));
        }
        let piece = bytes.checked_next_multiple_of(GRAIN);
        // No graph records calls on the host.
        let pieces = |piece| if piece > MANY_PIECES { 1 } else { if self.on_host { 2 } else { 4 } };
        let memory = piece.and_then(|piece| Some((piece, piece.checked_mul(pieces(piece))?)));
        let Some((piece, bytes)) = memory.filter(|&(_, bytes)| isize::try_from(bytes).is_ok())
        else {
            return Err(Error::value(format!("{who} cannot have a workspace of {bytes} bytes")));
        };
        Ok(MemoryRequest { bytes, keep: self.in_graphs, piece, pieces: pieces(piece) })
    }

    /// Notes that all ranks have created the memory, and so have finished reading the previous one.
    pub fn made(&mut self, memory: &MemoryRequest) {
        let &MemoryRequest { piece, pieces, .. } = memory;
        *self = Self { piece, pieces, ..Self::new(self.on_host) };
    }

    /// Notes that the call that was started has failed.
    pub fn fail(&mut self) {
        self.failed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const MIB: usize = 1 << 20;

    fn turn(workspace: &mut Workspace, bytes: usize, capture: u64) -> WorkspaceSlot {
        loop {
            match workspace.begin("gather", bytes, capture).expect("served") {
                CallStart::Turn(turn) => return turn,
                CallStart::Make(memory) => workspace.made(&memory),
            }
        }
    }

    fn with(on_host: bool, bytes: usize) -> Workspace {
        let mut workspace = Workspace::new(on_host);
        let Ok(CallStart::Make(memory)) = workspace.begin("gather", bytes, 0) else {
            panic!("there is no memory yet")
        };
        workspace.made(&memory);
        workspace
    }

    #[test]
    fn eager_calls_alternate_and_graphs_have_pieces_of_their_own() {
        let mut workspace = with(false, 3 * MIB);
        let turns = [0, 0, 7, 0, 7, 7, 8, 0].map(|capture| turn(&mut workspace, MIB, capture));
        let pieces = turns.map(|turn| turn.offset / (4 * MIB));
        assert_eq!(pieces, [1, 0, 3, 1, 2, 3, 2, 0]);
        assert_eq!(
            turns.map(|turn| turn.entry),
            [false, false, true, false, false, false, true, false]
        );
    }

    #[test]
    fn a_large_workspace_has_one_piece_and_a_barrier() {
        let mut workspace = Workspace::new(false);
        let Ok(CallStart::Make(memory)) = workspace.begin("gather", 65 * MIB, 0) else {
            panic!("there is no memory yet")
        };
        assert_eq!((memory.bytes, memory.keep), (66 * MIB, false));
        workspace.made(&memory);
        let turns = [0, 0, 7, 7].map(|capture| turn(&mut workspace, MIB, capture));
        assert_eq!(turns, [WorkspaceSlot { offset: 0, entry: true }; 4]);
    }

    #[test]
    fn memory_is_made_for_what_runs_and_kept_for_graphs() {
        for (on_host, bytes, made) in [
            (true, 1, 4 * MIB),
            (false, 1, 8 * MIB),
            (false, 64 * MIB, 256 * MIB),
            (true, 64 * MIB + 1, 66 * MIB),
        ] {
            let Ok(CallStart::Make(memory)) = Workspace::new(on_host).begin("gather", bytes, 0)
            else {
                panic!("there is no memory yet")
            };
            assert_eq!((memory.bytes, memory.keep), (made, false), "{bytes}");
        }
        let mut workspace = with(false, 1);
        turn(&mut workspace, 2 * MIB, 5);
        let Ok(CallStart::Make(memory)) = workspace.begin("gather", 2 * MIB + 1, 0) else {
            panic!("too small")
        };
        assert_eq!((memory.bytes, memory.keep), (16 * MIB, true));
        workspace.made(&memory);
        // The graph uses the previous memory; the current memory may be replaced.
        assert!(matches!(
            workspace.begin("gather", 5 * MIB, 0),
            Ok(CallStart::Make(MemoryRequest { keep: false, .. }))
        ));
        // A capture that was in progress also starts over.
        assert!(turn(&mut workspace, MIB, 5).entry);
    }

    #[test]
    fn what_cannot_be_made_is_refused_and_changes_nothing() {
        let mut workspace = with(false, 1);
        let recorded = workspace.begin("scatter", 2 * MIB + 1, 7).expect_err("a graph is recorded");
        assert_eq!(recorded.kind, ErrorKind::Internal);
        assert!(
            recorded
                .message
                .starts_with("scatter has 2097152 bytes of workspace and needs 2097153"),
            "{recorded}"
        );
        for bytes in [usize::MAX, isize::MAX as usize] {
            let error = workspace.begin("scatter", bytes, 0).expect_err("no such memory");
            assert_eq!(
                (error.kind, error.message),
                (ErrorKind::Value, format!("scatter cannot have a workspace of {bytes} bytes"))
            );
        }
        assert_eq!(turn(&mut workspace, 1, 0), turn(&mut with(false, 1), 1, 0));
    }

    #[test]
    fn after_a_failure_all_meet_once() {
        let mut workspace = with(true, 1);
        turn(&mut workspace, 1, 0);
        workspace.fail();
        assert_eq!([0, 0].map(|capture| turn(&mut workspace, 1, capture).entry), [true, false]);
    }
}
