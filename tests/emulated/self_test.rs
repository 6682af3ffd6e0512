//! Tests of the kernel emulator itself: indices, barriers, units that arrive in parts.

use crate::program::Program;
use symm::kernels::cuda::driver::Grid;

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn build(world: u32) -> Program {
    Program::build("tests/emulated/self_test", world, None, None)
}

#[test]
fn two_ranks_exchange_units() {
    const THREADS: u32 = 4;
    let program = build(2);
    let mut inboxes = [vec![0u128; THREADS as usize], vec![0u128; THREADS as usize]];
    let mut torn = vec![0u32; 2 * THREADS as usize];
    let [first, second] = inboxes.each_mut().map(|inbox| inbox.as_mut_ptr().addr() as u64);
    let args = bytes_of(&[first, second, torn.as_mut_ptr().addr() as u64, 1000]);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (program, args) = (&program, &args);
            // SAFETY: inboxes and counters outlive the scope. An inbox holds a unit per thread, and
            // the counters hold a word per thread and rank.
            scope.spawn(move || unsafe {
                program.launch("ping_pong", rank, Grid::new(1, THREADS), args)
            });
        }
    });
    for inbox in &inboxes {
        assert!(inbox.iter().all(|&unit| unit
            == u128::from_ne_bytes(std::array::from_fn(|i| 1000u32.to_ne_bytes()[i % 4]))));
    }
    assert!(torn.iter().sum::<u32>() > 0, "no unit was ever seen in pieces");
}

#[test]
fn a_block_barrier_orders_its_block() {
    let mut cells = vec![0u32; 3 * 8];
    let mut errors = 0u32;
    let args = bytes_of(&[cells.as_mut_ptr().addr() as u64, (&raw mut errors).addr() as u64, 200]);
    // SAFETY: a cell for each of the 24 threads.
    unsafe { build(1).launch("relay", 0, Grid::new(3, 8), &args) };
    assert_eq!(errors, 0);
}

#[test]
fn every_thread_knows_its_place() {
    let mut seen = vec![0u32; 3 * 2 * 5];
    let args = bytes_of(&[seen.as_mut_ptr().addr() as u64]);
    for rank in 0..3 {
        // SAFETY: a word for each of two blocks of five threads of three ranks.
        unsafe { build(3).launch("places", rank, Grid::new(2, 5), &args) };
    }
    assert_eq!(seen, (1..=30).collect::<Vec<_>>());
}

#[test]
#[should_panic(expected = "bytes of arguments of places")]
fn arguments_of_another_size_are_refused() {
    // SAFETY: the launch fails before it reads them.
    unsafe { build(1).launch("places", 0, Grid::new(1, 1), &[0; 12]) };
}
