//! Heap allocations of a call, counted by thread.

use crate::threads::with_ranks;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use symm::coll::alias::overwritten;
use symm::coll::call::{Call, CallSpec, Collective, Span};
use symm::dtype::DType;
use symm::rank::Rank;

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator serves every request unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending may have no counter any more.
        let _ = TAKEN.try_with(|taken| taken.set(taken.get() + 1));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_short_call_on_an_idle_group_takes_no_memory() {
    with_ranks(2, |group, rank| {
        for count in [1, 100] {
            let mut data = vec![rank as i32 + 1; count];
            let (me, n) = group.place();
            let mut run = |op: Collective| {
                let span = [Span { addr: data.as_mut_ptr().addr(), bytes: size_of_val(&*data) }];
                let (inputs, outputs): (&[Span], &[Span]) = match (op, rank) {
                    (Collective::Broadcast, 0) => (&span, &[]),
                    (Collective::Broadcast, _) => (&[], &span),
                    _ => (&span, &span),
                };
                let spec = CallSpec {
                    op,
                    dtype: DType::I32,
                    root: Rank(0),
                    inputs: inputs.into(),
                    outputs: outputs.into(),
                    ..CallSpec::barrier(None)
                };
                assert_eq!(overwritten(std::slice::from_ref(&spec), me), []);
                // SAFETY: `data` is this rank's own, and outlives the call.
                group.run(&[unsafe { Call::new(spec, me, n) }.unwrap()], None).unwrap();
            };
            for op in [Collective::AllReduce, Collective::Broadcast] {
                (0..3).for_each(|_| run(op));
                let before = TAKEN.get();
                (0..10).for_each(|_| run(op));
                assert_eq!(TAKEN.get() - before, 0, "{op:?} of {count} elements on rank {rank}");
            }
        }
    });
}
