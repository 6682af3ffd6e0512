//! Signals as a GPU runs them, on a single GPU: all ranks' kernels run at the same time, each on a
//! separate stream. Not covered: links between GPUs.

use crate::on_a_gpu;
use cudarc::driver::sys;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symm::control::{ControlBlock, Identity};
use symm::error::ErrorKind;
use symm::kernels::cuda::driver::{OwnStream, check};
use symm::mem::device::DeviceTable;
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;
use symm::window::signal_cuda::GpuSignals;

const SLOTS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(20);

struct Member {
    signals: GpuSignals,
    stream: OwnStream,
    pad: DeviceTable,
    /// A byte that peers copy, and the bytes copied from each peer.
    shown: DeviceTable,
    seen: DeviceTable,
}

impl Member {
    fn raw(&self) -> usize {
        self.stream.stream().0
    }

    /// Reads `bytes` bytes at `address`, once all work is done.
    fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.stream.stream().copy(read.as_mut_ptr() as u64, address, bytes).unwrap();
        self.stream.stream().synchronize().unwrap();
        read
    }
}

fn members(n: u32) -> Vec<Member> {
    let bytes = SegmentLayout::new(n as usize).total_bytes();
    let file = ShmSegment::create(bytes).unwrap();
    let member = |rank| {
        let segment = ShmSegment::map(file.try_clone().unwrap(), bytes).unwrap();
        let identities =
            (0..n).map(|global| Identity { pid: std::process::id(), global }).collect();
        let control =
            Arc::new(ControlBlock::new(segment, Rank(rank), "test".into(), identities, 1));
        control
            .segment()
            .reserve(0, control.layout().control_bytes(), format_args!("a test"))
            .unwrap();
        let signals = GpuSignals::new(&control, 0).unwrap();
        let pad = signals.table(&vec![0xFF; SLOTS * 4 * n as usize]).unwrap();
        signals.clear(pad.address(), SLOTS * 4 * n as usize).unwrap();
        let (shown, seen) =
            (signals.table(&[0]).unwrap(), signals.table(&vec![0; n as usize]).unwrap());
        Member { signals, stream: OwnStream::new().unwrap(), pad, shown, seen }
    };
    (0..n).map(member).collect()
}

fn pads(members: &[Member]) -> Vec<u64> {
    members.iter().map(|member| member.pad.address()).collect()
}

/// Every rank writes a byte, and all ranks copy it, between barriers.
fn show_and_copy(members: &[Member], byte: u8) {
    let pads = pads(members);
    for member in members {
        let stream = member.stream.stream();
        stream.fill(member.shown.address(), byte, 1).unwrap();
        member.signals.barrier(&pads, 0, PATIENCE, member.raw()).unwrap();
        for (rank, peer) in members.iter().enumerate() {
            stream.copy(member.seen.address() + rank as u64, peer.shown.address(), 1).unwrap();
        }
        member.signals.barrier(&pads, 3, PATIENCE, member.raw()).unwrap();
    }
}

fn check_seen(members: &[Member], byte: u8) {
    for (rank, member) in members.iter().enumerate() {
        let n = members.len();
        assert_eq!(member.read(member.seen.address(), n), vec![byte; n], "rank {rank} of {n}");
        assert_eq!(member.signals.failure(), None, "rank {rank} of {n}");
        assert_eq!(
            member.read(member.pad.address(), SLOTS * 4 * n),
            vec![0; SLOTS * 4 * n],
            "pad of rank {rank} of {n}"
        );
    }
}

/// The work that `body` enqueues on every rank's stream, as one graph per rank.
fn captured(members: &[Member], body: impl Fn()) -> Vec<sys::CUgraphExec> {
    let (global, null) =
        (sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL, std::ptr::null_mut());
    for member in members {
        // SAFETY: the stream lives.
        check("begin", unsafe {
            sys::cuStreamBeginCapture_v2(member.stream.stream().raw(), global)
        })
        .unwrap();
    }
    body();
    // These calls do not invalidate a capture.
    members[0].signals.clear(members[0].seen.address(), members.len()).unwrap();
    drop(members[0].signals.table(&[1, 2, 3]).unwrap());
    let end = |member: &Member| {
        let mut graph = null as sys::CUgraph;
        // SAFETY: valid for a write; the stream lives.
        check("end", unsafe {
            sys::cuStreamEndCapture(member.stream.stream().raw(), &raw mut graph)
        })
        .unwrap();
        graph
    };
    // All captures end before the first graph is instantiated, which is not allowed during a
    // capture.
    let graphs: Vec<sys::CUgraph> = members.iter().map(end).collect();
    let ready = |graph: sys::CUgraph| {
        let mut ready = null as sys::CUgraphExec;
        // SAFETY: valid for a write; the graph was just recorded.
        check("instantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0) })
            .unwrap();
        ready
    };
    graphs.into_iter().map(ready).collect()
}

#[test]
fn signals_order_streams_and_replay() {
    on_a_gpu(|_| order_and_replay());
}

fn order_and_replay() {
    // At most 4 ranks: with more, streams would share the GPU's eight queues, in which their ranks
    // would wait for each other.
    for n in 2..=4 {
        let members = members(n);
        for byte in 1..50 {
            show_and_copy(&members, byte);
        }
        check_seen(&members, 49);
        let graphs = captured(&members, || show_and_copy(&members, 200));
        for _ in 0..3 {
            members[0].signals.clear(members[0].seen.address(), n as usize).unwrap();
            for (member, graph) in members.iter().zip(&graphs) {
                // SAFETY: both live.
                check("replay", unsafe {
                    sys::cuGraphLaunch(*graph, member.stream.stream().raw())
                })
                .unwrap();
            }
            check_seen(&members, 200);
        }
        assert!(members.iter().all(|member| member.signals.drain(PATIENCE)));
    }
    waiting_kernels_end_when_they_are_drained();
}

fn waiting_kernels_end_when_they_are_drained() {
    let members = members(2);
    let pads = pads(&members);
    members[0].signals.wait(&pads, Rank(1), 0, Duration::from_secs(600), members[0].raw()).unwrap();
    let begun = Instant::now();
    assert!(members[0].signals.drain(Duration::from_millis(100)));
    assert!(
        begun.elapsed() >= Duration::from_millis(100) && begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(members[0].signals.failure(), None);
    let refused =
        members[0].signals.barrier(&pads, 0, PATIENCE, members[0].raw()).expect_err("closed");
    assert_eq!(refused.kind, ErrorKind::Aborted);
}
