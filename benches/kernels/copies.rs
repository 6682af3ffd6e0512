//! Copies into a buffer whose lines another core owns, like those of a shared staging buffer after
//! its last reader.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use symm::dtype::{DType, ReduceOp};
use symm::kernels::cpu::{InputElements, WriteMode, copy, reduce};

/// A way to copy: (dst, src, bytes).
type Copy = unsafe fn(*mut u8, *const u8, usize);

const WAYS: &[(&str, Copy)] = &[
    ("cached", cached),
    ("streaming", streaming),
    ("memcpy", memcpy),
    #[cfg(target_arch = "x86_64")]
    ("rep movsb", rep_movsb),
    #[cfg(target_arch = "x86_64")]
    ("prefetchw", prefetchw),
];

unsafe fn cached(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller promises what `copy` requires.
    unsafe { copy(dst, src, bytes, WriteMode::Cached) }
}

unsafe fn streaming(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller promises what `copy` requires.
    unsafe { copy(dst, src, bytes, WriteMode::Streaming) }
}

unsafe fn memcpy(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller promises what `copy_to_nonoverlapping` requires.
    unsafe { src.copy_to_nonoverlapping(dst, bytes) }
}

#[cfg(target_arch = "x86_64")]
unsafe fn rep_movsb(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's contract; the ABI guarantees a clear direction flag.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _, inout("rdi") dst => _, inout("rsi") src => _,
            options(nostack, preserves_flags));
    }
}

/// Requests ownership of the lines of `AHEAD` bytes before it stores to them.
#[cfg(target_arch = "x86_64")]
unsafe fn prefetchw(dst: *mut u8, src: *const u8, bytes: usize) {
    const AHEAD: usize = 4096;
    for start in (0..bytes).step_by(AHEAD) {
        let length = AHEAD.min(bytes - start);
        for line in (start..start + length).step_by(64) {
            // SAFETY: a prefetch never faults.
            unsafe {
                std::arch::asm!(
                    "prefetchw [{}]",
                    in(reg) dst.wrapping_add(line),
                    options(nostack, preserves_flags)
                )
            };
        }
        // SAFETY: `start + length <= bytes`.
        unsafe { src.add(start).copy_to_nonoverlapping(dst.add(start), length) };
    }
}

pub(super) fn report() {
    println!(
        "copy to lines that another core has read: copy GB/s (bytes copied once) / that core's \
         read GB/s"
    );
    let sizes = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
    print!("{:<11}", "");
    sizes.iter().for_each(|size| print!("{:>7} KiB    ", size >> 10));
    println!();
    for &(name, way) in WAYS {
        print!("{name:<11}");
        for bytes in sizes {
            let (copied, read) = handed_over(way, bytes);
            print!(" {copied:>6.1}/{read:<6.1}");
        }
        println!();
    }
    println!(
        "staged by {RANKS} ranks at once, {SLOTS} slots each: GB/s of input a rank, copied in and \
         reduced by parts"
    );
    print!("{:<11}", "");
    let shapes = [
        (64, 1),
        (256, 1),
        (512, 1),
        (1024, 1),
        (4096, 1),
        (16 << 10, 1),
        (1024, 16),
        (16 << 10, 256),
        (64 << 10, 1024),
    ];
    shapes.iter().for_each(|(total, chunks)| print!("{:>10}", format!("{total}K/{chunks}")));
    println!();
    for &(name, way) in WAYS {
        print!("{name:<11}");
        for (total, chunks) in shapes {
            print!("{:>10.1}", staged(way, (total << 10) / chunks, chunks));
        }
        println!();
    }
}

const RANKS: usize = 4;
const SLOTS: usize = 3;

/// `RANKS` threads copy private inputs, chunk by chunk, into rings of slots that all of them read,
/// and each reduces its part of every chunk, as a two-phase all-reduce does before it returns the
/// result. Returns the speed of the least disturbed round.
fn staged(way: Copy, chunk: usize, chunks: usize) -> f64 {
    let total = chunk * chunks;
    let rounds = (100_000_000 / total).clamp(12, 2000);
    let mut memory: Vec<Vec<u8>> = (0..RANKS).map(|_| vec![1u8; SLOTS * chunk]).collect();
    let rings: Vec<usize> =
        memory.iter_mut().map(|ring| ring.as_mut_ptr().expose_provenance()).collect();
    let arrived = AtomicUsize::new(0);
    let all_times = Mutex::new(Vec::new());
    let run = |rank: usize| {
        pin(rank);
        let input = vec![rank as u8; total];
        let mut output = vec![0u8; chunk / RANKS];
        let mut arrivals = 0;
        let mut barrier = || {
            arrivals += RANKS;
            arrived.fetch_add(1, Ordering::AcqRel);
            while arrived.load(Ordering::Acquire) < arrivals {
                std::hint::spin_loop();
            }
        };
        let mut times = Vec::new();
        for _ in 0..rounds {
            barrier();
            let start = Instant::now();
            for at in 0..chunks {
                let slot = |of: usize| rings[of] + at % SLOTS * chunk;
                let part = rank * (chunk / RANKS);
                let source = |of| InputElements {
                    ptr: std::ptr::with_exposed_provenance(slot(of) + part),
                    factor: 1.0,
                };
                // SAFETY: the rings outlive the threads. There is a barrier between the writes of a
                // slot and its reads, and there are two between its reads and the next writes.
                unsafe {
                    way(
                        std::ptr::with_exposed_provenance_mut(slot(rank)),
                        input[at * chunk..].as_ptr(),
                        chunk,
                    );
                    barrier();
                    let list: [InputElements; RANKS] = std::array::from_fn(source);
                    let count = output.len() / 4;
                    reduce(
                        ReduceOp::Sum,
                        DType::F32,
                        output.as_mut_ptr(),
                        &list,
                        count,
                        WriteMode::Cached,
                    );
                }
            }
            barrier();
            times.push(start.elapsed().as_secs_f64());
        }
        if rank == 0
            && let Ok(mut all) = all_times.lock()
        {
            all.append(&mut times);
        }
    };
    std::thread::scope(|scope| {
        for rank in 1..RANKS {
            let run = &run;
            scope.spawn(move || run(rank));
        }
        run(0);
    });
    let times = all_times.into_inner().unwrap_or_default();
    total as f64 / times.into_iter().fold(f64::INFINITY, f64::min) / 1e9
}

fn pin(core: usize) {
    // SAFETY: a zeroed set is empty; both calls receive its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Thread 0 copies in and thread 1 reads, in turns; returns the median speeds of both.
fn handed_over(way: Copy, bytes: usize) -> (f64, f64) {
    let rounds = (200_000_000 / bytes).clamp(15, 400);
    let source = vec![7u8; bytes];
    let mut staging = vec![1u8; bytes + 64];
    let staging = &raw mut staging[0];
    let staging = staging.wrapping_add(staging.align_offset(64)).expose_provenance();
    let turn = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            pin(1);
            let mut times = Vec::new();
            for round in 0..rounds {
                while turn.load(Ordering::Acquire) != 2 * round + 1 {
                    std::hint::spin_loop();
                }
                let start = Instant::now();
                // SAFETY: `staging` outlives the scope and thread 0 waits for the turn.
                let words = unsafe {
                    std::slice::from_raw_parts(
                        std::ptr::with_exposed_provenance::<u64>(staging),
                        bytes / 8,
                    )
                };
                black_box(words.iter().fold(0, |sum, word| sum ^ word));
                times.push(start.elapsed().as_secs_f64());
                turn.store(2 * round + 2, Ordering::Release);
            }
            times
        });
        pin(0);
        let mut times = Vec::new();
        for round in 0..rounds {
            while turn.load(Ordering::Acquire) != 2 * round {
                std::hint::spin_loop();
            }
            black_box(source.iter().step_by(64).fold(0, |sum, byte| sum ^ byte));
            let start = Instant::now();
            // SAFETY: both hold `bytes` bytes; thread 1 waits for the turn.
            unsafe { way(std::ptr::with_exposed_provenance_mut(staging), source.as_ptr(), bytes) };
            times.push(start.elapsed().as_secs_f64());
            turn.store(2 * round + 1, Ordering::Release);
        }
        let reads = reader.join().unwrap_or_default();
        (speed(bytes, times), speed(bytes, reads))
    })
}

fn speed(bytes: usize, mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    bytes as f64 / times[times.len() / 2] / 1e9
}
