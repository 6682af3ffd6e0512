//! The kernels of one rank of a group, compiled and loaded when they are first needed.

use super::prepare::{Launch, Program};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::kernels::cuda::compile::{Arch, Variant, cubin};
use crate::kernels::cuda::driver::{Device, Kernel, RelaxedCapture, Stream};
use std::collections::HashMap;
use std::time::Instant;

/// A program, gated or not, and what it is compiled for if it looks at elements.
type Key = (Program, bool, Option<(DType, ReduceOp)>);

/// See there.
#[derive(Debug)]
pub(super) struct Kernels {
    world: u32,
    rank: u32,
    arch: Arch,
    overlap: bool,
    loaded: HashMap<Key, Kernel>,
}

impl Kernels {
    pub(super) fn new(device: &Device, world: usize, rank: usize, overlap: bool) -> Self {
        let (major, minor) = device.capability;
        // Devices before Hopper know no programmatic launches.
        let overlap = overlap && major >= 9;
        Self { world: world as u32, rank: rank as u32, arch: Arch { major, minor }, overlap, loaded: HashMap::new() }
    }

    /// Compiles and loads `program`, or its gated variant, unless it is loaded; in the current context.
    pub(super) fn load(&mut self, program: Program, gated: bool, dtype: DType, op: ReduceOp) -> Result<Kernel> {
        let key = (program, gated, program.reduces().then_some((dtype, op)));
        if let Some(kernel) = self.loaded.get(&key) {
            return Ok(*kernel);
        }
        let (name, symbol) = program.names();
        let (dtype, op) = key.2.unzip();
        let variant = Variant { program: name, world: self.world, rank: self.rank, dtype, op, gated };
        let kernel = load(self.arch, &variant, symbol)?;
        self.loaded.insert(key, kernel);
        Ok(kernel)
    }

    /// Enqueues `launch`.
    pub(super) fn launch(&mut self, launch: &Launch, dtype: DType, op: ReduceOp, stream: Stream) -> Result<()> {
        let kernel = self.load(launch.program, launch.gated, dtype, op)?;
        kernel.launch(stream, launch.blocks, launch.threads, self.overlap, launch.args.bytes())
    }
}

/// Compiles `variant`, unless the cache has it, and loads its kernel `symbol`; in the current context.
pub(super) fn load(arch: Arch, variant: &Variant, symbol: &str) -> Result<Kernel> {
    let begun = Instant::now();
    // Also where another thread captures: loading would end its capture.
    let _relaxed = RelaxedCapture::begin()?;
    let kernel = Kernel::load(&cubin(variant, arch)?, symbol)?;
    log::debug!("{variant} was ready after {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    Ok(kernel)
}
