//! Compilation of a program to machine code: its constants and its architecture.

use super::cache::{CacheKey, kept, kept_before};
use super::nvrtc::{Compiled, nvrtc};
use super::source::{HEADERS, program};
use crate::config::Config;
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::error::Result;
use std::fmt;
use std::time::Instant;

/// A program with all constants of its compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Path of the program, such as `reduce/low_latency`.
    pub program: &'static str,
    /// Number of ranks: `SYMM_WORLD`.
    pub world: u32,
    /// This rank's number, less than `world`: `SYMM_RANK`.
    pub rank: u32,
    /// `SYMM_DTYPE`, torch's code; for programs that read elements.
    pub dtype: Option<DType>,
    /// `SYMM_OP`, torch's code; for programs that reduce.
    pub op: Option<ReduceOp>,
    /// `SYMM_ZERO_COPY`: the zero-copy variant.
    pub zero_copy: bool,
    /// `SYMM_TREE`: sums are pairwise.
    pub order: SumOrder,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of rank {} of {}", self.program, self.rank, self.world)?;
        if let Some(dtype) = self.dtype {
            write!(f, ", {}", dtype.name())?;
        }
        if let Some(op) = self.op {
            write!(f, ", {}", op.name())?;
        }
        if self.zero_copy {
            write!(f, ", zero-copy")?;
        }
        if self.order == SumOrder::Tree {
            write!(f, ", tree")?;
        }
        Ok(())
    }
}

/// The compute capability of a device. Machine code runs only on the capability that it was
/// compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Major number: 9 of 9.0.
    pub major: u32,
    /// Minor number: 0 of 9.0.
    pub minor: u32,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// Returns the compiler's options for `variant` on `arch`.
pub fn options(variant: &Variant, arch: Arch) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        // A fused multiply-add rounds once where the CPU's kernels round twice; both must give the
        // same bits.
        "--fmad=false".into(),
        format!("-DSYMM_WORLD={}", variant.world),
        format!("-DSYMM_RANK={}", variant.rank),
    ];
    options.extend(variant.dtype.map(|dtype| format!("-DSYMM_DTYPE={}", dtype as u8)));
    options.extend(variant.op.map(|op| format!("-DSYMM_OP={}", op as u8)));
    options.extend(variant.zero_copy.then(|| "-DSYMM_ZERO_COPY=1".into()));
    options.extend((variant.order == SumOrder::Tree).then(|| "-DSYMM_TREE=1".into()));
    options
}

/// Compiles `variant` for `arch`, with `further` options of the compiler, without the cache.
pub fn compile(variant: &Variant, arch: Arch, further: &[&str]) -> Result<Compiled> {
    let program = program(variant.program)?;
    let mut options = options(variant, arch);
    options.extend(further.iter().map(ToString::to_string));
    nvrtc()?.compile(&format!("{}.cu", program.name), program.text, HEADERS, &options)
}

fn key(variant: &Variant, arch: Arch) -> Result<CacheKey> {
    Ok(CacheKey::of(
        nvrtc()?.version(),
        program(variant.program)?,
        HEADERS,
        &options(variant, arch),
    ))
}

/// Returns the machine code of `variant` for `arch`, to be loaded as a module, if it is cached.
pub fn cached(variant: &Variant, arch: Arch) -> Option<Vec<u8>> {
    kept_before(&Config::get().cache_dir, &key(variant, arch).ok()?)
}

/// Returns the machine code of `variant` for `arch`, compiled now if it is not cached.
pub fn cubin(variant: &Variant, arch: Arch) -> Result<Vec<u8>> {
    kept(&Config::get().cache_dir, &key(variant, arch)?, || {
        let started = Instant::now();
        let compiled = compile(variant, arch, &[])?;
        log::debug!("compiled {variant} for {arch} in {} ms", started.elapsed().as_millis());
        Ok(compiled.cubin)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_every_constant() {
        let arch = Arch { major: 9, minor: 0 };
        let plain = Variant {
            program: "exchange/any",
            world: 8,
            rank: 3,
            dtype: None,
            op: None,
            zero_copy: false,
            order: SumOrder::Rank,
        };
        let common = [
            "--gpu-architecture=sm_90",
            "--std=c++17",
            "--fmad=false",
            "-DSYMM_WORLD=8",
            "-DSYMM_RANK=3",
        ];
        assert_eq!(options(&plain, arch), common);
        let reducing = Variant { dtype: Some(DType::BF16), op: Some(ReduceOp::Avg), ..plain };
        assert_eq!(
            options(&reducing, Arch { major: 10, minor: 3 })[0],
            "--gpu-architecture=sm_103"
        );
        assert_eq!(options(&reducing, arch)[5..], ["-DSYMM_DTYPE=15", "-DSYMM_OP=1"]);
        let zero_copy = Variant { zero_copy: true, ..plain };
        assert_eq!(
            (options(&zero_copy, arch)[5..].join(" "), zero_copy.to_string()),
            ("-DSYMM_ZERO_COPY=1".into(), "exchange/any of rank 3 of 8, zero-copy".into())
        );
        assert_eq!(reducing.to_string(), "exchange/any of rank 3 of 8, bfloat16, AVG");
        let tree = Variant { order: SumOrder::Tree, ..reducing };
        assert_eq!(
            (options(&tree, arch)[7..].join(" "), tree.to_string()),
            ("-DSYMM_TREE=1".into(), format!("{reducing}, tree"))
        );
    }
}
