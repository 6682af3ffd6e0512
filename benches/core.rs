//! Times only the core, without torch: `cargo bench --bench core -- [ranks] [op,..|all]
//! [bytes,..|all] [staged]`.
//!
//! Ranks are processes. Each operation runs in blocks of back-to-back calls between barriers. The
//! result is the median over calls of the slowest rank's block mean, in µs. `bytes` is the largest
//! tensor of a rank: the output of all_gather, the input of reduce_scatter. With `staged`, no
//! receiver reads the sender's memory. Results are checked before timing.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use symm::coll::call::{Call, CallSpec, Collective, Span};
use symm::coll::message::{Message, MessageSpec};
use symm::completion::Completion;
use symm::control::Identity;
use symm::dtype::{DType, ReduceOp};
use symm::group::{Group, GroupTuning};
use symm::mem::layout::SegmentLayout;
use symm::mem::shm::ShmSegment;
use symm::rank::Rank;

const OPS: &[&str] = &[
    "barrier",
    "broadcast",
    "all_reduce",
    "all_reduce_bf16",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
];
const SIZES: &[usize] = &[8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if args.first().is_some_and(|arg| arg == "--rank") {
        return child(args[1].parse().unwrap(), args[2].parse().unwrap(), &args[3], &args[4..]);
    }
    let n: u32 = args.first().map_or(4, |arg| arg.parse().unwrap());
    let file = ShmSegment::create(SegmentLayout::new(n as usize).total_bytes()).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let exe = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..n)
        .map(|rank| {
            let mut command = std::process::Command::new(&exe);
            command
                .args(["--rank", &rank.to_string(), &n.to_string(), &path])
                .args(args.iter().skip(1));
            command
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::inherit())
                .spawn()
                .unwrap()
        })
        .collect();
    let pids: Vec<String> = children.iter().map(|child| child.id().to_string()).collect();
    let mut children = children;
    for child in &mut children {
        use std::io::Write;
        writeln!(child.stdin.take().unwrap(), "{}", pids.join(" ")).unwrap();
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

fn child(rank: u32, n: u32, path: &str, args: &[String]) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let members = line
        .split_whitespace()
        .enumerate()
        .map(|(i, pid)| Identity { pid: pid.parse().unwrap(), global: i as u32 })
        .collect();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let segment =
        ShmSegment::map(file.into(), SegmentLayout::new(n as usize).total_bytes()).unwrap();
    let tuning = GroupTuning {
        zero_copy: args.get(2).is_none_or(|arg| arg != "staged"),
        ..GroupTuning::default()
    };
    let group =
        Group::from_joined(segment, "bench", Rank(rank), members, Duration::from_secs(60), tuning)
            .unwrap();
    let list = |index: usize| {
        args.get(index)
            .filter(|text| *text != "all")
            .map(|text| text.split(',').map(String::from).collect::<Vec<_>>())
    };
    let ops = list(0).unwrap_or_else(|| OPS.iter().map(ToString::to_string).collect());
    let sizes = list(1).map_or_else(
        || SIZES.to_vec(),
        |sizes| sizes.iter().map(|size| size.parse().unwrap()).collect(),
    );
    if rank == 0 {
        println!("{n} ranks: µs per call at {sizes:?} bytes");
    }
    for op in ops {
        let mut row = Vec::new();
        for &bytes in if op == "barrier" { &sizes[..1] } else { &sizes[..] } {
            row.push(format!("{:>11.2}", time(&group, &op, rank, n, bytes.max(4 * n as usize))));
        }
        if rank == 0 {
            println!("{op:<16}{}", row.concat());
        }
    }
}

fn span(data: &mut [f32], start: usize, count: usize) -> Span {
    Span { addr: data[start..start + count].as_mut_ptr() as usize, bytes: count * 4 }
}

fn time(group: &Group, op: &str, rank: u32, n: u32, bytes: usize) -> f64 {
    let count = bytes / 4;
    let piece = count / n as usize;
    let count = if matches!(op, "all_gather" | "reduce_scatter" | "all_to_all") {
        piece * n as usize
    } else {
        count
    };
    let bf16 = op == "all_reduce_bf16";
    let one = if bf16 { f32::from_bits(0x3f80_3f80) } else { 1.0 };
    // Aligned to cache lines, like torch's tensors.
    let (mut given, mut taken) = (vec![one; count + 16], vec![0.0; count + 16]);
    let aligned = |data: &mut Vec<f32>| data.as_ptr().align_offset(64);
    let (from, to) = (aligned(&mut given), aligned(&mut taken));
    let (input, output) = (&mut given[from..from + count], &mut taken[to..to + count]);
    let all = |data: &mut [f32]| span(data, 0, count);
    let pieces = |data: &mut [f32]| {
        (0..n as usize).map(|i| span(data, i * piece, piece)).collect::<Vec<_>>()
    };
    let (code, inputs, outputs) = match op {
        "barrier" => (Collective::Barrier, vec![], vec![]),
        "broadcast" if rank == 0 => (Collective::Broadcast, vec![all(input)], vec![]),
        "broadcast" => (Collective::Broadcast, vec![], vec![all(output)]),
        "all_reduce" | "all_reduce_bf16" => {
            (Collective::AllReduce, vec![all(input)], vec![all(output)])
        }
        "all_gather" => (Collective::AllGather, vec![span(input, 0, piece)], pieces(output)),
        "reduce_scatter" => {
            (Collective::ReduceScatter, pieces(input), vec![span(output, 0, piece)])
        }
        "all_to_all" => (Collective::AllToAll, pieces(input), pieces(output)),
        "send_recv" => (Collective::Barrier, vec![], vec![]),
        other => panic!("no operation {other}; there are {OPS:?}"),
    };
    let run = |op, reduce_op, dtype, inputs: &[Span], outputs: &[Span]| {
        let spec = CallSpec {
            op,
            dtype,
            reduce_op,
            inputs: inputs.into(),
            outputs: outputs.into(),
            ..CallSpec::barrier(None)
        };
        let (me, n) = group.place();
        // SAFETY: the tensors belong to this rank and outlive the call.
        group.run(&[unsafe { Call::new(spec, me, n) }.unwrap()], None).unwrap();
    };
    let dtype = if bf16 { DType::BF16 } else { DType::F32 };
    let out = all(output);
    let message = all(input);
    let once = || {
        if op == "send_recv" {
            // Half of a ping-pong between ranks 0 and 1.
            let transfer = |send: bool, peer, span| {
                let spec = MessageSpec {
                    peer: Some(Rank(peer)),
                    tag: 0,
                    dtype: DType::F32,
                    span,
                    timeout: None,
                };
                // SAFETY: the tensors belong to this rank and outlive the wait for the message.
                let message = unsafe { Message::new(spec) };
                let done = Completion::new(|outcome, _| outcome.unwrap());
                let ticket =
                    if send { group.send(message, done) } else { group.recv(message, done) };
                group.wait(ticket.unwrap(), None).unwrap();
            };
            match rank {
                0 => (transfer(true, 1, message), transfer(false, 1, out)).1,
                1 => (transfer(false, 0, out), transfer(true, 0, message)).1,
                _ => {}
            }
        } else {
            run(code, ReduceOp::Sum, dtype, &inputs, &outputs);
        }
    };
    let barrier = || group.run(&[Call::barrier(None)], None).unwrap();
    once();
    barrier();
    let expected = match op {
        "all_reduce" | "reduce_scatter" => n as f32,
        "all_reduce_bf16" if n == 4 => f32::from_bits(0x4080_4080),
        "all_reduce_bf16" if n == 2 => f32::from_bits(0x4000_4000),
        _ => one,
    };
    let received = match op {
        "barrier" => 0,
        "broadcast" if rank == 0 => 0,
        "send_recv" if rank > 1 => 0,
        "reduce_scatter" => piece,
        _ => count,
    };
    assert!(
        output[..received].iter().all(|&value| value == expected),
        "{op} of {bytes} bytes: wrong result on rank {rank}"
    );
    let calls = (200_000_000 / (bytes + 100_000)).clamp(1, 500);
    let mut blocks: Vec<f64> = Vec::new();
    let begin = Instant::now();
    let mut enough = [0f32];
    while enough[0] == 0.0 {
        barrier();
        let start = Instant::now();
        for _ in 0..calls {
            once();
        }
        let took = start.elapsed().as_secs_f64() * 1e6
            / calls as f64
            / if op == "send_recv" { 2.0 } else { 1.0 };
        let mut slowest = [took as f32];
        let most = [span(&mut slowest, 0, 1)];
        run(Collective::AllReduce, ReduceOp::Max, DType::F32, &most, &most);
        blocks.push(slowest[0].into());
        enough[0] =
            f32::from(u8::from(blocks.len() >= 5 && begin.elapsed() > Duration::from_millis(600)));
        let told = [span(&mut enough, 0, 1)];
        let (from, to): (&[Span], &[Span]) = if rank == 0 { (&told, &[]) } else { (&[], &told) };
        run(Collective::Broadcast, ReduceOp::Sum, dtype, from, to);
    }
    blocks.sort_by(f64::total_cmp);
    blocks[blocks.len() / 2]
}
