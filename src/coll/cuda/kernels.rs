//! The kernels of one rank of a group, compiled and loaded on first use. The most common kernels
//! are loaded before the first call if their code is cached.

use super::kernel_spec::{KERNELS, KernelSpec};
use super::launch::Launch;
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::error::Result;
use crate::kernels::cuda::compile::{Arch, Variant, cached, cubin};
use crate::kernels::cuda::driver::{Device, Kernel, RelaxedCapture, Stream};
use crate::lock::lock;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::Instant;

/// A kernel, zero-copy or not, and its element type and operation if it has them.
type KernelKey = (&'static KernelSpec, bool, Option<(DType, ReduceOp)>);

/// The kernels of a communicator, compiled and loaded on first use.
#[derive(Debug)]
pub(crate) struct Kernels {
    world: u32,
    rank: u32,
    overlap: bool,
    order: SumOrder,
    loaded: BTreeMap<KernelKey, Kernel>,
}

impl Kernels {
    pub(crate) fn new(
        device: &Device,
        world: usize,
        rank: usize,
        overlap: bool,
        order: SumOrder,
    ) -> Self {
        // Devices before Hopper have no programmatic launches.
        let overlap = overlap && device.capability.0 >= 9;
        Self { world: world as u32, rank: rank as u32, overlap, order, loaded: BTreeMap::new() }
    }

    fn variant(&self, (kernel, zero_copy, typed): KernelKey) -> Variant {
        let (dtype, op) = typed.unzip();
        let order = typed
            .map_or(SumOrder::Rank, |(dtype, op)| self.order.of(op, dtype, self.world as usize));
        Variant {
            program: kernel.program,
            world: self.world,
            rank: self.rank,
            dtype,
            op,
            zero_copy,
            order,
        }
    }

    /// Loads the cached kernels that move bytes and run the usual reductions. This must precede the
    /// first collective: a load may wait for all kernels on the device, and one of them may then
    /// wait for a peer that waits for this rank, which is a deadlock.
    pub(crate) fn preload(&mut self, device: &Device) {
        let begun = Instant::now();
        for key in usual() {
            let variant = self.variant(key);
            let symbol = key.0.symbol;
            let load = || {
                cached(&variant, arch(device))
                    .map(|code| load_code(device, &variant, &code, symbol))
            };
            match known(device, &variant, symbol).map(Ok).or_else(load) {
                Some(Ok(kernel)) => _ = self.loaded.insert(key, kernel),
                Some(Err(error)) => log::info!("{variant} was not loaded: {error}"),
                None => {}
            }
        }
        log::debug!(
            "{} kernels were there from the start, after {:.1} ms",
            self.loaded.len(),
            begun.elapsed().as_secs_f64() * 1e3
        );
    }

    /// Returns the kernel of `launch` on `device`, whose context is current. Loads the kernel if it
    /// is not loaded yet.
    pub(crate) fn ready(
        &mut self,
        device: &Device,
        launch: &Launch,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Kernel> {
        let typed = launch.kernel.typed.then_some((dtype, op));
        self.ready_key(device, (launch.kernel, launch.zero_copy, typed))
    }

    fn ready_key(&mut self, device: &Device, key: KernelKey) -> Result<Kernel> {
        if let Some(kernel) = self.loaded.get(&key) {
            return Ok(*kernel);
        }
        let kernel = load(device, &self.variant(key), key.0.symbol)?;
        Ok(*self.loaded.entry(key).or_insert(kernel))
    }

    /// Loads a kernel that moves bytes on `device`, whose context is current, unless it is loaded.
    pub(crate) fn load_untyped(
        &mut self,
        device: &Device,
        kernel: &'static KernelSpec,
    ) -> Result<()> {
        self.ready_key(device, (kernel, false, None)).map(drop)
    }

    /// Enqueues `launch` on `device`, whose context is current.
    pub(crate) fn launch(
        &mut self,
        device: &Device,
        launch: &Launch,
        dtype: DType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        let kernel = self.ready(device, launch, dtype, op)?;
        kernel.launch(stream, launch.grid, self.overlap, launch.args.bytes())
    }
}

/// Returns the keys of the kernels that move bytes, or that sum or average floats.
fn usual() -> Vec<KernelKey> {
    let floats = [DType::F32, DType::BF16, DType::F16];
    let reductions: Vec<_> = floats
        .iter()
        .flat_map(|&dtype| [ReduceOp::Sum, ReduceOp::Avg].map(|op| Some((dtype, op))))
        .collect();
    let mut keys = Vec::new();
    for kernel in KERNELS {
        let typed: &[_] = if kernel.typed { &reductions } else { &[None] };
        let handshakes: &[_] = if kernel.zero_copy { &[false, true] } else { &[false] };
        for &zero_copy in handshakes {
            keys.extend(typed.iter().map(|&typed| (kernel, zero_copy, typed)));
        }
    }
    keys
}

/// A device's modules. They stay until the process exits, because successive groups mostly have the
/// same shape.
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

/// Returns the kernel `symbol` of `variant`, if this process has loaded it. A program may have
/// several kernels.
fn known(device: &Device, variant: &Variant, symbol: &'static str) -> Option<Kernel> {
    lock(&LOADED).get(&device.ordinal())?.kernels.get(&(*variant, symbol)).copied()
}

/// Returns the kernel `symbol` of `variant` on `device`, whose context is current. Compiles the
/// variant unless it is cached, and loads the kernel unless this process has already loaded it.
pub(crate) fn load(device: &Device, variant: &Variant, symbol: &'static str) -> Result<Kernel> {
    match known(device, variant, symbol) {
        Some(kernel) => Ok(kernel),
        None => load_code(device, variant, &cubin(variant, arch(device))?, symbol),
    }
}

fn load_code(
    device: &Device,
    variant: &Variant,
    code: &[u8],
    symbol: &'static str,
) -> Result<Kernel> {
    let begun = Instant::now();
    // Relaxed, because loading would otherwise invalidate another thread's capture.
    let _relaxed = RelaxedCapture::begin()?;
    // Not under the lock, because loading may wait for running kernels.
    let kernel = Kernel::load(code, symbol)?;
    log::debug!("{variant} was loaded in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    let mut all = lock(&LOADED);
    let there = match all.entry(device.ordinal()) {
        Entry::Occupied(there) => there.into_mut(),
        Entry::Vacant(place) => place
            .insert(Loaded { _device: Device::open(device.ordinal())?, kernels: HashMap::new() }),
    };
    Ok(*there.kernels.entry((*variant, symbol)).or_insert(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::kernel_spec::{EXCHANGE, ONE_SHOT, REDUCE_STAGED};
    use crate::kernels::cuda::source::{PROGRAMS, program};

    #[test]
    fn kernels_are_those_that_the_sources_have() {
        for kernel in KERNELS {
            let text = program(kernel.program).expect("it is there").text;
            assert_eq!(text.contains("SYMM_ZERO_COPY"), kernel.zero_copy, "{kernel:?}");
            assert!(text.contains(kernel.symbol), "{kernel:?}");
        }
        let others = ["internode/", "signal/", "fused/"];
        let of_collectives = |name: &str| !others.iter().any(|other| name.starts_with(other));
        let sources: Vec<_> = PROGRAMS
            .iter()
            .map(|program| program.name)
            .filter(|name| of_collectives(name))
            .collect();
        assert!(
            sources.iter().all(|name| KERNELS.iter().any(|kernel| kernel.program == *name)),
            "{sources:?}"
        );
    }

    #[test]
    fn what_moves_bytes_and_usual_reductions_are_loaded_early() {
        let count = |kernel| usual().iter().filter(|key| key.0 == kernel).count();
        assert_eq!([&EXCHANGE, &ONE_SHOT, &REDUCE_STAGED].map(count), [2, 6, 12]);
    }
}
