//! Clients from C++ for the load generator.

use super::ffi::{LoadResult, StoreHandle};
use super::guarded;
use super::torch_store::TorchStore;
use crate::store::Store;
use crate::store::load_generator::{Workload, drive};

/// The stores of the clients, one each.
pub(super) struct LoadGenerator(Vec<TorchStore>);

pub(super) fn load_generator() -> Box<LoadGenerator> {
    Box::new(LoadGenerator(Vec::new()))
}

impl LoadGenerator {
    pub(super) fn add_client(&mut self, store: cxx::UniquePtr<StoreHandle>) {
        self.0.push(TorchStore::new(store));
    }

    pub(super) fn run_load(&self, work: &str, calls: u32) -> LoadResult {
        let (mut seconds, mut nanoseconds) = (0.0, Vec::new());
        let status = guarded(|| {
            let clients: Vec<&dyn Store> = self.0.iter().map(|store| store as &dyn Store).collect();
            let measured = drive(&clients, Workload::named(work)?, calls)?;
            (seconds, nanoseconds) = (measured.seconds, measured.nanoseconds);
            Ok(())
        });
        LoadResult { status, seconds, nanoseconds }
    }
}
