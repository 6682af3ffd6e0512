//! The kernels of one rank of a group, compiled and loaded when they are first needed; the usual ones that the cache has, before.

use super::launch::{Launch, Program};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::kernels::cuda::compile::{Arch, Variant, cached, cubin};
use crate::kernels::cuda::driver::{Device, Kernel, RelaxedCapture, Stream};
use crate::lock::lock;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::Instant;

/// A program, zero-copy or not, and what it is compiled for if it looks at elements.
type Key = (Program, bool, Option<(DType, ReduceOp)>);

/// Kernels of a communicator, compiled and loaded when they are first needed.
#[derive(Debug)]
pub(crate) struct Kernels {
    world: u32,
    rank: u32,
    overlap: bool,
    loaded: BTreeMap<Key, Kernel>,
}

impl Kernels {
    pub(crate) fn new(device: &Device, world: usize, rank: usize, overlap: bool) -> Self {
        // Devices before Hopper know no programmatic launches.
        let overlap = overlap && device.capability.0 >= 9;
        Self { world: world as u32, rank: rank as u32, overlap, loaded: BTreeMap::new() }
    }

    fn variant(&self, (program, zero_copy, typed): Key) -> Variant {
        let (dtype, op) = typed.unzip();
        Variant { program: program.names().0, world: self.world, rank: self.rank, dtype, op, zero_copy }
    }

    /// Loads what bytes that move and the usual reductions need, as far as it was compiled before. Loading may wait for whatever runs on
    /// the device: where a kernel waits for a peer that waits for this rank, it is too late.
    pub(crate) fn preload(&mut self, device: &Device) {
        let begun = Instant::now();
        for key in usual() {
            let variant = self.variant(key);
            let symbol = key.0.names().1;
            let load = || cached(&variant, arch(device)).map(|code| load_code(device, &variant, &code, symbol));
            match known(device, &variant, symbol).map(Ok).or_else(load) {
                Some(Ok(kernel)) => _ = self.loaded.insert(key, kernel),
                Some(Err(error)) => log::info!("{variant} was not loaded: {error}"),
                None => {}
            }
        }
        log::debug!("{} kernels were there from the start, after {:.1} ms", self.loaded.len(), begun.elapsed().as_secs_f64() * 1e3);
    }

    /// Enqueues `launch` on `device`, whose context is current.
    pub(crate) fn launch(&mut self, device: &Device, launch: &Launch, dtype: DType, op: ReduceOp, stream: Stream) -> Result<()> {
        let key = (launch.program, launch.zero_copy, launch.program.reduces().then_some((dtype, op)));
        let kernel = match self.loaded.get(&key) {
            Some(kernel) => *kernel,
            None => {
                let kernel = load(device, &self.variant(key), launch.program.names().1)?;
                *self.loaded.entry(key).or_insert(kernel)
            }
        };
        kernel.launch(stream, launch.grid, self.overlap, launch.args.bytes())
    }
}

/// Keys of the kernels that programs need that move bytes, and sum or average floats.
fn usual() -> Vec<Key> {
    let floats = [DType::F32, DType::BF16, DType::F16];
    let reductions: Vec<_> = floats.iter().flat_map(|&dtype| [ReduceOp::Sum, ReduceOp::Avg].map(|op| Some((dtype, op)))).collect();
    let mut keys = Vec::new();
    for program in Program::ALL {
        let typed: &[_] = if program.reduces() { &reductions } else { &[None] };
        let handshakes: &[_] = if program.can_be_zero_copy() { &[false, true] } else { &[false] };
        for &zero_copy in handshakes {
            keys.extend(typed.iter().map(|&typed| (program, zero_copy, typed)));
        }
    }
    keys
}

/// A device's modules. They stay until the process ends: groups come and go, most of them of the same shape.
struct Loaded {
    /// Keeps the context.
    _device: Device,
    kernels: HashMap<(Variant, &'static str), Kernel>,
}

static LOADED: Mutex<BTreeMap<i32, Loaded>> = Mutex::new(BTreeMap::new());

fn arch(device: &Device) -> Arch {
    let (major, minor) = device.capability;
    Arch { major, minor }
}

/// The kernel `symbol` of `variant`, if this process has loaded it. A program may have several.
fn known(device: &Device, variant: &Variant, symbol: &'static str) -> Option<Kernel> {
    lock(&LOADED).get(&device.ordinal())?.kernels.get(&(*variant, symbol)).copied()
}

/// Compiles `variant`, unless the cache has it, and loads its kernel `symbol`, unless this process has; on `device`, whose context is
/// current.
pub(crate) fn load(device: &Device, variant: &Variant, symbol: &'static str) -> Result<Kernel> {
    match known(device, variant, symbol) {
        Some(kernel) => Ok(kernel),
        None => load_code(device, variant, &cubin(variant, arch(device))?, symbol),
    }
}

fn load_code(device: &Device, variant: &Variant, code: &[u8], symbol: &'static str) -> Result<Kernel> {
    let begun = Instant::now();
    // Also where another thread captures: loading would end its capture.
    let _relaxed = RelaxedCapture::begin()?;
    // Not under the lock, as it may wait for what runs.
    let kernel = Kernel::load(code, symbol)?;
    log::debug!("{variant} was loaded in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    let mut all = lock(&LOADED);
    let there = match all.entry(device.ordinal()) {
        Entry::Occupied(there) => there.into_mut(),
        Entry::Vacant(place) => place.insert(Loaded { _device: Device::open(device.ordinal())?, kernels: HashMap::new() }),
    };
    Ok(*there.kernels.entry((*variant, symbol)).or_insert(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cuda::source::program;

    #[test]
    fn usual_kernels_are_variants_that_the_sources_have() {
        for source in Program::ALL {
            let text = program(source.names().0).expect("it is there").text;
            assert_eq!(text.contains("SYMM_ZERO_COPY"), source.can_be_zero_copy(), "{source:?}");
        }
        let count = |program| usual().iter().filter(|key| key.0 == program).count();
        assert_eq!([Program::Exchange, Program::OneShot, Program::ReduceStaged].map(count), [2, 6, 12]);
    }
}
