//! Every CUDA program compiles for every architecture, and keeps its working values in registers.
//! Needs NVRTC, no GPU: `make test-kernels`; `make test-all` compiles for more numbers of ranks.

use crate::process::{process, role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::OnceLock;
use symm::config::Config;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::compile::{Arch, Variant, compile};
use symm::kernels::cuda::source::{HEADERS, PROGRAMS, Program};

/// Ampere, Hopper, Blackwell.
const ARCHS: [Arch; 3] =
    [Arch { major: 8, minor: 0 }, Arch { major: 9, minor: 0 }, Arch { major: 10, minor: 0 }];

/// The architecture for which all variants are compiled.
const THOROUGH: Arch = ARCHS[1];

/// Numbers of ranks. Programs unroll over them, so that each may need another number of registers.
const WORLDS: std::ops::RangeInclusive<u32> = 2..=8;
/// The minimum, the maximum and one in between.
const FEW_WORLDS: [u32; 3] = [2, 3, 8];
/// If set, one architecture is compiled with all of [`WORLDS`], the others with [`FEW_WORLDS`], and
/// all with all of [`ELEMENTS`], which takes five times as long.
const ALL_WORLDS: &str = "KERNELS_COMPILE_ALL";

/// If set, only programs whose names contain this text are compiled.
const ONLY: &str = "KERNELS_COMPILE_ONLY";

/// The element types for programs that depend on them: each width, and each kind of accumulator.
const ELEMENTS: [(DType, ReduceOp); 6] = [
    (DType::F32, ReduceOp::Sum),
    (DType::BF16, ReduceOp::Avg),
    (DType::F16, ReduceOp::Max),
    (DType::F64, ReduceOp::PremulSum),
    (DType::I64, ReduceOp::Product),
    (DType::U8, ReduceOp::BitXor),
];

/// The resources of one kernel, as reported by ptxas.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Needs {
    kernel: String,
    registers: u32,
    /// Bytes of stack frame, spill stores and spill loads; also of functions that were not inlined.
    memory: [u32; 3],
}

#[derive(Serialize, Deserialize)]
struct Outcome {
    /// The variant, as text.
    title: String,
    program: String,
    zero_copy: bool,
    arch: String,
    kernels: Result<Vec<Needs>, String>,
}

/// The share of the programs that one process compiles: every `parts`-th from `part` on.
#[derive(Serialize, Deserialize)]
struct Part {
    part: usize,
    parts: usize,
    file: PathBuf,
}

/// Returns true if `text`, or a header that it includes, mentions `word`.
fn mentions(text: &str, word: &str) -> bool {
    let included = |header: &str| {
        text.lines()
            .any(|line| line.starts_with("#include") && line.contains(&format!("\"{header}\"")))
    };
    text.contains(word)
        || HEADERS.iter().any(|header| included(header.name) && mentions(header.text, word))
}

fn variants(program: &'static Program) -> Vec<(Variant, Arch)> {
    let all_worlds = std::env::var_os(ALL_WORLDS).is_some();
    let plain = Variant {
        program: program.name,
        world: 0,
        rank: 0,
        dtype: None,
        op: None,
        zero_copy: false,
        order: SumOrder::Rank,
    };
    // Kernels on sentinel slots are for types in which a word of all ones is a NaN.
    let sentinel = mentions(program.text, "static_assert(EMPTY_IS_NAN");
    let served = |dtype: DType| !sentinel || matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    let typed: Vec<Variant> = match mentions(program.text, "SYMM_DTYPE") {
        true => ELEMENTS
            .iter()
            .filter(|(dtype, _)| served(*dtype))
            .map(|&(dtype, op)| Variant { dtype: Some(dtype), op: Some(op), ..plain })
            .collect(),
        false => vec![plain],
    };
    let mut all = Vec::new();
    for (arch, variant) in
        ARCHS.iter().flat_map(|&arch| typed.iter().map(move |&variant| (arch, variant)))
    {
        // Most variants are compiled for one architecture; the others show what it hides.
        let thorough = arch == THOROUGH;
        let first = variant.dtype.is_none_or(|dtype| dtype == ELEMENTS[0].0);
        let wanted = |world: &u32| match (thorough, all_worlds) {
            (true, true) => true,
            (false, true) => FEW_WORLDS.contains(world),
            (true, false) if first => FEW_WORLDS.contains(world),
            // The maximum needs the most registers.
            (_, false) => (thorough || first) && world == WORLDS.end(),
        };
        for world in WORLDS.filter(wanted) {
            // For the last rank, the order of visits wraps around.
            let wraps = all_worlds && thorough && FEW_WORLDS.contains(&world);
            let ranks = if wraps { vec![0, world - 1] } else { vec![0] };
            let handshakes: &[bool] = if mentions(program.text, "#ifdef SYMM_ZERO_COPY") {
                &[false, true]
            } else {
                &[false]
            };
            let with = |(rank, zero_copy)| (Variant { world, rank, zero_copy, ..variant }, arch);
            all.extend(
                ranks
                    .into_iter()
                    .flat_map(|rank| handshakes.iter().map(move |&zero_copy| (rank, zero_copy)))
                    .map(with),
            );
        }
    }
    all
}

/// Parses the output of `--ptxas-options=-v`.
fn parse(log: &str) -> Vec<Needs> {
    let number = |line: &str, unit: &str| {
        let before = line.split(unit).next().filter(|before| before.len() < line.len())?;
        before.split_whitespace().last()?.parse::<u32>().ok()
    };
    let mut kernels: Vec<Needs> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernels.push(Needs {
                kernel: rest.split('\'').next().unwrap_or_default().into(),
                ..Needs::default()
            });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        for (sum, unit) in kernel.memory.iter_mut().zip([
            " bytes stack frame",
            " bytes spill stores",
            " bytes spill loads",
        ]) {
            *sum += number(line, unit).unwrap_or(0);
        }
        kernel.registers = kernel.registers.max(number(line, " registers").unwrap_or(0));
    }
    kernels
}

/// Compiles everything once for all tests. Without a compiler it prints a message and returns
/// `None`.
fn outcomes() -> Option<&'static [Outcome]> {
    if Config::get().nvrtc.is_none() {
        // Not eprintln, because the test harness would capture it.
        let _ = writeln!(std::io::stderr(), "skipped: SYMM_NVRTC_PATH is not set");
        return None;
    }
    static ALL: OnceLock<Vec<Outcome>> = OnceLock::new();
    Some(ALL.get_or_init(|| {
        // Processes, not threads, because the compiler holds a lock for its whole process.
        let parts = std::thread::available_parallelism().map_or(1, usize::from);
        let folder = tempfile::tempdir().unwrap();
        let file = |part: usize| folder.path().join(part.to_string());
        let start = |part: usize| {
            let role = Part { part, parts, file: file(part) };
            // A program that NVRTC takes from its cache has no output of ptxas.
            let mut compiler = process("compile::a_part_of_the_programs", &role);
            compiler.env("CUDA_CACHE_DISABLE", "1").stdout(Stdio::null()).spawn().unwrap()
        };
        let compilers: Vec<_> = (0..parts).map(start).collect();
        let finish = |(part, mut compiler): (usize, std::process::Child)| {
            assert!(compiler.wait().unwrap().success(), "part {part} of {parts}");
            serde_json::from_slice::<Vec<Outcome>>(&std::fs::read(file(part)).unwrap()).unwrap()
        };
        compilers.into_iter().enumerate().flat_map(finish).collect()
    }))
}

#[test]
#[ignore = "the tests start it"]
fn a_part_of_the_programs() {
    let Some(Part { part, parts, file }) = role() else { return };
    let compiled = |(variant, arch): (Variant, Arch)| Outcome {
        title: variant.to_string(),
        program: variant.program.into(),
        zero_copy: variant.zero_copy,
        arch: arch.to_string(),
        kernels: compile(&variant, arch, &["--ptxas-options=-v"])
            .map(|done| parse(&done.log))
            .map_err(|error| error.message),
    };
    let only = std::env::var(ONLY).unwrap_or_default();
    let own = PROGRAMS
        .iter()
        .filter(|program| program.name.contains(&only))
        .flat_map(variants)
        .skip(part)
        .step_by(parts);
    let outcomes: Vec<Outcome> = own.map(compiled).collect();
    std::fs::write(file, serde_json::to_vec(&outcomes).unwrap()).unwrap();
}

#[test]
fn every_program_compiles() {
    let Some(outcomes) = outcomes() else { return };
    let mut registers: BTreeMap<(&str, bool, &str), u32> = BTreeMap::new();
    let mut failures: Vec<String> = Vec::new();
    for Outcome { title, program, zero_copy, arch, kernels } in outcomes {
        match kernels {
            // In this case the output of ptxas has changed, and this test would not find spills
            // either.
            Ok(kernels)
                if kernels.is_empty() || kernels.iter().any(|kernel| kernel.registers == 0) =>
            {
                failures.push(format!(
                    "{title} for {arch}: no kernel, or none whose needs are known: {kernels:?}"
                ));
            }
            Ok(kernels) => {
                let most = registers.entry((program, *zero_copy, arch)).or_default();
                *most = kernels.iter().map(|kernel| kernel.registers).fold(*most, u32::max);
            }
            Err(message) => failures.push(format!("{title} for {arch}: {message}")),
        }
    }
    let mut report = format!(
        "{} variants of {} programs; most registers of a thread:\n",
        outcomes.len(),
        PROGRAMS.len()
    );
    for ((program, zero_copy, arch), most) in registers {
        let _ = writeln!(
            report,
            "  {program}{} {arch}: {most}",
            if zero_copy { ", zero-copy" } else { "" }
        );
    }
    let _ = std::io::stderr().write_all(report.as_bytes());
    // Most failures have the same cause.
    let shown = failures.iter().take(3).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(
        failures.is_empty(),
        "{} of {} do not compile:\n{shown}",
        failures.len(),
        outcomes.len()
    );
}

#[test]
fn no_program_spills() {
    let Some(outcomes) = outcomes() else { return };
    let mut offenders: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Outcome { title, program, arch, kernels, .. } in outcomes {
        for kernel in kernels.iter().flatten().filter(|kernel| kernel.memory != [0; 3]) {
            let [stack, stores, loads] = kernel.memory;
            let line = format!(
                "{title} for {arch}: {stack} bytes of stack, {stores} spilled, {loads} read back"
            );
            offenders.entry(format!("{} of {program}", kernel.kernel)).or_default().push(line);
        }
    }
    let show = |(name, lines): (&String, &mut Vec<String>)| {
        lines.sort();
        let first: String = lines.iter().take(8).map(|line| format!("  {line}\n")).collect();
        format!("{name}, {} variants, of which the first are:\n{first}", lines.len())
    };
    let shown: String = offenders.iter_mut().map(show).collect();
    assert!(offenders.is_empty(), "kernels keep data in memory of their own:\n{shown}");
}

#[test]
fn the_report_of_ptxas_is_understood() {
    let log = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function \
        'k' for 'sm_90'\n\
               ptxas info    : Function properties for k\n\
               ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 \
               bytes spill loads\n\
               ptxas info    : Used 12 registers, used 0 barriers, 16 bytes cumulative stack size\n\
               ptxas info    : Compiling entry function 'l' for 'sm_90'\nptxas info    : Used 9 \
               registers, used 1 barriers\n";
    let k = Needs { kernel: "k".into(), registers: 12, memory: [16, 8, 4] };
    let l = Needs { kernel: "l".into(), registers: 9, memory: [0; 3] };
    assert_eq!(parse(log), [k, l]);
}
