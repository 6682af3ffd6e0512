//! CUDA kernels as host threads: their sources are compiled by the C++ compiler with
//! `SYMM_EMULATED`.
//!
//! The emulation shows that a protocol's stores, polls and barriers fit together, even if the words
//! of a unit arrive separately and threads pause anywhere (`SYMM_EMULATED_SEED`, default 1, varies
//! the pauses; 0 omits them). It cannot show that a fence is missing which only the memory model of
//! a GPU requires.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use crate::calls::Random;
use libloading::Library;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cuda::driver::Grid;

type Kernel = unsafe extern "C" fn(*const u8);
type Launch = unsafe extern "C" fn(Kernel, u32, u32, u32, u32, *const u8, u64);

/// One source file of kernels, compiled for a number of ranks and, if it reduces, for an element
/// type and an operation.
#[derive(Clone)]
pub(crate) struct Program {
    library: Arc<Library>,
    name: String,
}

type Key = (String, Vec<String>);

impl Program {
    /// Builds the kernels of `src/kernels/cuda/{path}.cu`, or of `{path}.cu` if `path` starts with
    /// `tests/`. A process compiles each program once.
    ///
    /// # Panics
    /// With the compiler's output, if compilation fails.
    pub(crate) fn build(
        path: &str,
        world: u32,
        dtype: Option<DType>,
        op: Option<ReduceOp>,
    ) -> Program {
        Program::build_in(SumOrder::Rank, path, world, dtype, op)
    }

    /// [`Program::build`] of kernels that sum in `order`.
    pub(crate) fn build_in(
        order: SumOrder,
        path: &str,
        world: u32,
        dtype: Option<DType>,
        op: Option<ReduceOp>,
    ) -> Program {
        Program::build_with(path, &defines(order, world, dtype, op))
    }

    /// [`Program::build`] with any definitions, each as the compiler takes it: `-DNAME=VALUE`.
    pub(crate) fn build_with(path: &str, defines: &[String]) -> Program {
        static BUILT: LazyLock<Mutex<HashMap<Key, Arc<OnceLock<Program>>>>> =
            LazyLock::new(Mutex::default);
        let key = (path.to_owned(), defines.to_vec());
        let slot = Arc::clone(
            BUILT.lock().expect("no build panics under this lock").entry(key).or_default(),
        );
        slot.get_or_init(|| Program {
            library: Arc::new(compile(path, defines)),
            name: path.to_owned(),
        })
        .clone()
    }

    /// Runs `kernel` as `rank` on one thread for each thread of the grid, and returns when they
    /// have ended. `args` are the bytes of its arguments. Ranks that wait for each other must be
    /// launched from different host threads.
    ///
    /// # Panics
    /// If there is no such kernel or its arguments have a different size.
    ///
    /// # Safety
    /// `args` are valid for the kernel: the memory that they point to lives until this returns, and
    /// only kernels write it.
    pub(crate) unsafe fn launch(&self, kernel: &str, rank: u32, grid: Grid, args: &[u8]) {
        static LAUNCHES: AtomicU64 = AtomicU64::new(1);
        static SEED: LazyLock<u64> = LazyLock::new(|| {
            std::env::var("SYMM_EMULATED_SEED")
                .map_or(1, |seed| seed.parse().expect("SYMM_EMULATED_SEED is a number"))
        });
        let seed =
            if *SEED == 0 { 0 } else { *SEED << 32 | LAUNCHES.fetch_add(1, Ordering::Relaxed) };
        // SAFETY: emulated.hpp gives these symbols these types.
        let (entry, size, launch) = unsafe {
            let size = self.library.get::<*const u64>(format!("{kernel}_args").as_bytes());
            let size = **size.unwrap_or_else(|_| panic!("{} has no kernel {kernel}", self.name));
            (
                *self.library.get::<Kernel>(kernel.as_bytes()).expect("a kernel"),
                size,
                *self.library.get::<Launch>(b"symm_launch").expect("a launcher"),
            )
        };
        assert_eq!(size, args.len() as u64, "bytes of arguments of {kernel} in {}", self.name);
        // A copy with the alignment of a kernel's arguments.
        let mut aligned = vec![0u128; args.len().div_ceil(16)];
        // SAFETY: `aligned` has at least as many bytes as `args`.
        unsafe {
            aligned.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(args.as_ptr(), args.len())
        };
        let Grid { blocks, threads, cluster } = grid;
        // SAFETY: `self.library` keeps the code loaded; the arguments have the kernel's size and
        // are valid by the caller's contract.
        unsafe { launch(entry, rank, blocks, threads, cluster, aligned.as_ptr().cast(), seed) };
    }

    /// [`Program::launch`] of three blocks of four threads with `args`, a `repr(C)` structure of
    /// numbers without padding.
    ///
    /// # Safety
    /// As for [`Program::launch`].
    pub(crate) unsafe fn launch_with<T>(&self, kernel: &str, rank: usize, args: &T) {
        // SAFETY: `args` has no padding.
        let args = unsafe { std::slice::from_raw_parts((&raw const *args).cast(), size_of::<T>()) };
        // SAFETY: the caller's contract.
        unsafe { self.launch(kernel, rank as u32, Grid::new(3, 4), args) };
    }
}

/// The definitions of kernels for `world` ranks and, if they reduce, for a type and an operation.
pub(crate) fn defines(
    order: SumOrder,
    world: u32,
    dtype: Option<DType>,
    op: Option<ReduceOp>,
) -> Vec<String> {
    let mut defines = vec![format!("-DSYMM_WORLD={world}")];
    defines.extend(dtype.map(|dtype| format!("-DSYMM_DTYPE={}", dtype as u8)));
    defines.extend(op.map(|op| format!("-DSYMM_OP={}", op as u8)));
    defines.extend((order == SumOrder::Tree).then(|| "-DSYMM_TREE=1".into()));
    defines
}

fn compiler() -> Command {
    let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    compiler.args("-std=c++20 -O1 -fPIC -pthread -fvisibility=hidden -ffp-contract=off".split(' '));
    compiler.args("-Wall -Wextra -Werror -Wno-unknown-pragmas".split(' '));
    // Flags of the user, for example sanitizers.
    compiler.args(std::env::var("SYMM_EMULATED_FLAGS").unwrap_or_default().split_whitespace());
    compiler
}

/// A precompiled copy of `standard.hpp`, which would otherwise take a third of the time in which
/// each kernel is compiled. Later runs with the same compiler and flags reuse it.
fn standard(root: &Path) -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let text = std::fs::read(root.join("tests/emulated/standard.hpp"))
            .expect("part of the repository");
        let version = compiler().arg("--version").output().expect("a C++ compiler");
        let mut hasher = DefaultHasher::new();
        (&text, &version.stdout, format!("{:?}", compiler())).hash(&mut hasher);
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("standard-{:x}", hasher.finish()));
        if !folder.exists() {
            let made =
                tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
            let header = made.path().join("standard.hpp");
            std::fs::write(&header, &text).expect("written");
            let status = compiler()
                .args(["-x", "c++-header"])
                .arg(&header)
                .arg("-o")
                .arg(header.with_extension("hpp.gch"))
                .status();
            assert!(status.is_ok_and(|status| status.success()), "standard.hpp does not compile");
            // Renaming publishes the complete folder; it fails if another process has published one
            // already.
            let _ = std::fs::rename(made.keep(), &folder);
        }
        folder.join("standard.hpp")
    })
}

fn compile(path: &str, defines: &[String]) -> Library {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = if path.starts_with("tests/") { "" } else { "src/kernels/cuda" };
    let source = root.join(folder).join(format!("{path}.cu"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let object = folder.path().join("kernels.so");
    let mut compiler = compiler();
    compiler.args("-shared -DSYMM_EMULATED -DSYMM_RANK=symm_emulated_rank -include".split(' '));
    compiler.arg(standard(root)).args(defines);
    compiler.arg("-I").arg(root.join("tests/emulated"));
    compiler.arg("-I").arg(root.join("src/kernels/cuda/include"));
    compiler.args(["-x", "c++"]).arg(&source).arg("-o").arg(&object);
    let output = compiler.output().expect("a C++ compiler");
    assert!(output.status.success(), "{compiler:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library just compiled has no initialisers beyond constants.
    unsafe { Library::new(&object) }.unwrap_or_else(|error| panic!("{}: {error}", object.display()))
}

/// The input of rank or node `giver`, in units so that it is aligned: floats between -2 and 2, or
/// integers of any bits.
pub(crate) fn numbers(giver: usize, bytes: usize, dtype: DType) -> Vec<u128> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (giver as u64 + 1));
    let mut random = move || random.next() >> 11;
    let mut element = || -> Vec<u8> {
        let number = random() as f64 / (1u64 << 51) as f64 - 2.0;
        if dtype == DType::F64 {
            number.to_le_bytes().to_vec()
        } else if matches!(dtype, DType::F32 | DType::C64) {
            (number as f32).to_le_bytes().to_vec()
        } else if dtype == DType::BF16 {
            ((number as f32).to_bits() >> 16).to_le_bytes()[..2].to_vec()
        } else if dtype == DType::F16 {
            // The bits of any number between -2 and 2.
            ((random() as u16) & 0xbfff).to_le_bytes().to_vec()
        } else {
            random().to_le_bytes()[..dtype.size()].to_vec()
        }
    };
    let mut all: Vec<u8> = std::iter::repeat_with(&mut element).flatten().take(bytes).collect();
    all.resize(bytes.next_multiple_of(16), 0);
    all.chunks_exact(16)
        .map(|unit| u128::from_le_bytes(unit.try_into().expect("16 bytes")))
        .collect()
}

pub(crate) fn bytes_of(units: &[u128]) -> &[u8] {
    // SAFETY: any bytes of numbers.
    unsafe { std::slice::from_raw_parts(units.as_ptr().cast(), size_of_val(units)) }
}
