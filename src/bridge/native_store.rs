//! Stores of this crate, for C++.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{Blob, InterruptHandle, Status, StoreHandle, StoreOp, StoreReply};
use super::guarded;
use super::outcome::same_codes;
use super::torch_store::TorchStore;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::deadline::{DeadlineStore, ThreadDeadline};
use crate::store::file::FileStore;
use crate::store::meet::{LAST_WORDS, StoreMeeting};
use crate::store::memory::MemoryStore;
use crate::store::request::{Request, StoreOp as RequestOp};
use crate::store::table::TableReply;
use crate::store::tcp::{TcpOptions, TcpStore};
use crate::store::{MAX_TIMEOUT, Store};
use crate::sys::interrupt;
use bytes::Bytes;
use ffi::{StoreResult, TcpSpec};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See `bridge::ffi`.
#[allow(missing_docs, unreachable_pub)] // cxx generates public items.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// A TCP store; `store::tcp::TcpOptions` documents the fields.
    struct TcpSpec {
        host: String,
        port: u16,
        /// Number of workers; negative if unknown.
        world_size: i64,
        is_master: bool,
        timeout_ms: i64,
        wait_for_workers: bool,
        multi_tenant: bool,
        /// The file descriptor on which the server listens; negative if there is none.
        listen_fd: i32,
        /// The secret that clients must know; empty if there is none.
        secret: Vec<u8>,
        require_same_user: bool,
    }

    /// A new store, or the error. A TCP store can be reached at this host and port.
    struct StoreResult {
        status: Status,
        store: Box<NativeStore>,
        host: String,
        port: u16,
    }

    unsafe extern "C++" {
        include!("symm/src/bridge.rs.h");
        type Status = crate::bridge::ffi::Status;
        type StoreOp = crate::bridge::ffi::StoreOp;
        type Blob<'a> = crate::bridge::ffi::Blob<'a>;
        type StoreReply = crate::bridge::ffi::StoreReply;
        type StoreHandle = crate::bridge::ffi::StoreHandle;
    }

    extern "Rust" {
        /// A store of `symm::store`, or the error.
        type NativeStore;
        fn store_memory() -> Box<NativeStore>;
        /// Opens a store in a file; `path` is in the system's bytes.
        fn store_file(path: &[u8], world_size: i64, timeout_ms: i64) -> StoreResult;
        fn store_tcp(spec: &TcpSpec) -> StoreResult;
        /// Wraps `store` for use by the core.
        fn wrap_store(store: UniquePtr<StoreHandle>) -> Box<NativeStore>;
        fn share(self: &NativeStore) -> Box<NativeStore>;
        /// Answers a request. `timeout_ms` limits a wait: 0 is the maximum, negative an error.
        fn call(
            self: &NativeStore,
            op: StoreOp,
            keys: &[Blob],
            values: &[Blob],
            amount: i64,
            timeout_ms: i64,
        ) -> StoreReply;
        /// Returns once all `size` ranks have called it with this key.
        fn barrier(self: &NativeStore, key: &[u8], rank: i64, size: i64, timeout_ms: i64)
        -> Status;
        /// Publishes `word` about `what` under `prefix`, and returns every rank's word. If `what`
        /// is empty, only waits until all ranks have arrived.
        fn meet(
            self: &NativeStore,
            prefix: &[u8],
            what: &[u8],
            word: &[u8],
            rank: i64,
            size: i64,
            timeout_ms: i64,
        ) -> StoreReply;
    }
}

/// Values or keys that pass between the languages.
pub struct Blobs(Vec<Bytes>);

pub(super) fn no_blobs() -> Box<Blobs> {
    Box::new(Blobs(Vec::new()))
}

impl Blobs {
    pub(super) fn add(&mut self, piece: &[u8]) {
        self.0.push(Bytes::copy_from_slice(piece));
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, index: usize) -> &[u8] {
        self.0.get(index).map_or(&[], |piece| piece)
    }

    pub(super) fn into_vec(self) -> Vec<Bytes> {
        self.0
    }
}

/// A store, or the error that prevented opening it.
pub(super) struct NativeStore(Result<Arc<dyn Store>>);

pub(super) fn store_memory() -> Box<NativeStore> {
    Box::new(NativeStore(Ok(Arc::new(MemoryStore::new()))))
}

pub(super) fn wrap_store(store: cxx::UniquePtr<StoreHandle>) -> Box<NativeStore> {
    Box::new(NativeStore(Ok(Arc::new(TorchStore::new(store)))))
}

pub(super) fn store_file(path: &[u8], world_size: i64, timeout_ms: i64) -> StoreResult {
    opened(|| {
        let world_size = unsigned("world size", world_size)?;
        let store = FileStore::open_within(
            Path::new(OsStr::from_bytes(path)),
            world_size,
            limit(timeout_ms)?,
        )?;
        Ok((Arc::new(store), String::new(), 0))
    })
}

pub(super) fn store_tcp(spec: &TcpSpec) -> StoreResult {
    opened(|| {
        let options = TcpOptions {
            host: spec.host.clone(),
            port: spec.port,
            world_size: u32::try_from(spec.world_size).ok(),
            is_master: spec.is_master,
            timeout: limit(spec.timeout_ms)?,
            wait_for_workers: spec.wait_for_workers,
            multi_tenant: spec.multi_tenant,
            listen_fd: (spec.listen_fd >= 0).then_some(spec.listen_fd),
            secret: (!spec.secret.is_empty()).then(|| spec.secret.clone()),
            require_same_user: spec.require_same_user,
        };
        let store = TcpStore::open(options)?;
        let (host, port) = (store.host().to_owned(), store.port());
        Ok((Arc::new(store), host, port))
    })
}

/// The handle that reports pending Python signals.
struct PythonSignals(cxx::UniquePtr<InterruptHandle>);

// SAFETY: `is_pending` may be called from any thread.
unsafe impl Send for PythonSignals {}
// SAFETY: as above; it does not change the handle.
unsafe impl Sync for PythonSignals {}

pub(super) fn watch_interrupts(handle: cxx::UniquePtr<InterruptHandle>) {
    let signals = PythonSignals(handle);
    interrupt::ask_with(move || {
        // Captures the whole value, which is `Sync`; otherwise the closure captures only the field.
        let signals = &signals;
        signals.0.as_ref().is_some_and(InterruptHandle::is_pending)
    });
}

impl NativeStore {
    pub(super) fn share(&self) -> Box<Self> {
        Box::new(Self(self.0.clone()))
    }

    pub(super) fn call(
        &self,
        op: StoreOp,
        keys: &[Blob<'_>],
        values: &[Blob<'_>],
        amount: i64,
        timeout_ms: i64,
    ) -> StoreReply {
        let mut reply = TableReply::Unit;
        let status = guarded(|| {
            let op = RequestOp::from_code(op.repr)
                .ok_or_else(|| Error::value(format!("operation {} is unknown", op.repr)))?;
            let keys = keys.iter().map(|key| text(key.data)).collect::<Result<_>>()?;
            let request = Request {
                amount,
                ..Request::new(op, keys, values.iter().map(|value| value.data).collect())
            };
            let limit = limit(timeout_ms)?;
            reply = self.store()?.call(
                &request,
                Some(ThreadDeadline::left().map_or(limit, |left| limit.min(left))),
            )?;
            Ok(())
        });
        answer(status, reply)
    }

    pub(super) fn barrier(&self, key: &[u8], rank: i64, size: i64, timeout_ms: i64) -> Status {
        guarded(|| {
            let (rank, size) = (unsigned("rank", rank)?, unsigned("world size", size)?);
            let (key, limit) = (text(key)?, limit(timeout_ms)?);
            let end = Instant::now() + limit;
            DeadlineStore::new(self.store()?, end, format!("barrier {key:?}")).barrier(
                key,
                Rank(rank),
                size,
                Some(limit),
            )
        })
    }

    pub(super) fn meet(
        &self,
        prefix: &[u8],
        what: &[u8],
        word: &[u8],
        rank: i64,
        size: i64,
        timeout_ms: i64,
    ) -> StoreReply {
        let mut words = Vec::new();
        let status = guarded(|| {
            let (me, size) = (Rank(unsigned("rank", rank)?), unsigned("world size", size)?);
            let deadline = Instant::now() + limit(timeout_ms)?;
            let about = format!("meeting of {size} ranks under {:?}", text(prefix)?);
            let store = DeadlineStore::new(self.store()?, deadline + LAST_WORDS, about);
            let meeting =
                StoreMeeting { store: &store, prefix: text(prefix)?.into(), me, size, deadline };
            if what.is_empty() {
                return meeting.assemble();
            }
            words = meeting.gather(text(what)?, word)?;
            Ok(())
        });
        answer(status, TableReply::Values(words))
    }

    fn store(&self) -> Result<&dyn Store> {
        self.0.as_deref().map_err(Clone::clone)
    }
}

fn opened(open: impl FnOnce() -> Result<(Arc<dyn Store>, String, u16)>) -> StoreResult {
    let mut store = Err(Error::internal("the store was never opened"));
    let (mut host, mut port) = (String::new(), 0);
    let status = guarded(|| {
        let (opened, its_host, its_port) = open()?;
        (store, host, port) = (Ok(opened), its_host, its_port);
        Ok(())
    });
    StoreResult { status, store: Box::new(NativeStore(store)), host, port }
}

fn answer(status: Status, reply: TableReply) -> StoreReply {
    let (number, pieces) = match reply {
        TableReply::Unit => (0, vec![]),
        TableReply::Flag(flag) => (i64::from(flag), vec![]),
        TableReply::Number(number) => (number, vec![]),
        TableReply::Value(value) => (0, vec![value]),
        TableReply::Values(values) => (0, values),
        TableReply::Keys(keys) => (0, keys.into_iter().map(Bytes::from).collect()),
    };
    StoreReply { status, number, pieces: Box::new(Blobs(pieces)) }
}

/// Converts c10d's timeout, whose 0 for "no limit" becomes the maximum.
fn limit(timeout_ms: i64) -> Result<Duration> {
    match u64::try_from(timeout_ms) {
        Ok(0) => Ok(MAX_TIMEOUT),
        Ok(ms) => Ok(Duration::from_millis(ms).min(MAX_TIMEOUT)),
        Err(_) => Err(Error::value(format!("a timeout of {timeout_ms} ms is negative"))),
    }
}

fn unsigned(what: &str, value: i64) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::value(format!("{what} {value} is out of range")))
}

fn text(key: &[u8]) -> Result<&str> {
    std::str::from_utf8(key)
        .map_err(|_| Error::value(format!("a key of {} bytes is not UTF-8", key.len())))
}

same_codes!(
    RequestOp, StoreOp: Set, CompareSet, Get, Add, Check, Wait, Delete, NumKeys, Append, MultiGet,
    MultiSet, Push, Pop, TryPop, QueueLen, ListKeys
);
