//! Work items of a job: one thread claims each item and sees the owner's writes, and the owner sees
//! the results.

use super::failure::SixtyFour;
use super::{Cell, model};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use symm::sync::work_items::WorkItems;

const JOBS: usize = 2;
const COUNT: usize = 2;

struct Shared {
    pieces: WorkItems<SixtyFour>,
    /// The owner's input for each job, and the result of each item of a job.
    given: [Cell; JOBS],
    made: [[Cell; COUNT]; JOBS],
}

impl Shared {
    /// Processes a work item, if one is left.
    fn take(&self) -> bool {
        let Some((job, piece)) = self.pieces.claim() else { return false };
        let (job, piece) = (job as usize, piece as usize);
        let before = self.made[job][piece].read();
        assert_eq!(before, 0, "piece {piece} of job {job} was claimed twice");
        self.made[job][piece].write(self.given[job].read() + piece as u64);
        self.pieces.finish();
        true
    }
}

#[test]
fn pieces_are_done_once_and_seen_by_the_owner() {
    model(3, || {
        let cells = || std::array::from_fn(|_| Cell::new());
        let shared = Arc::new(Shared {
            pieces: WorkItems::new(|| SixtyFour(AtomicU64::new(0))),
            given: cells(),
            made: std::array::from_fn(|_| std::array::from_fn(|_| Cell::new())),
        });
        let helper = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            for _ in 0..3 {
                if !helper.take() {
                    thread::yield_now();
                }
            }
        });
        for job in 0..JOBS {
            shared.given[job].write(10 * (job as u64 + 1));
            shared.pieces.offer(job as u64, COUNT as u64);
            while shared.take() {}
            while !shared.pieces.is_complete(COUNT as u64) {
                thread::yield_now();
            }
            for piece in 0..COUNT {
                assert_eq!(shared.made[job][piece].read(), 10 * (job + 1) as u64 + piece as u64);
            }
        }
        thread.join().unwrap();
    });
}
