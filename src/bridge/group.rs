//! The handle of a group for C++.
#![allow(unsafe_code, reason = "the promise of C++ about the memory of a call")]

use super::torch_store::TorchStore;
use super::transport::{TorchTransports, find_backends};
use super::{ffi, from_cpp, from_cpp_in_turn, guarded, milliseconds, outcome, started};
use crate::bootstrap::JoinOptions;
use crate::coll::alias;
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cuda::tuning::{chosen_ctas, cta_choice};
use crate::coll::message::{Message, MessageSpec};
use crate::config::Config;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::internode::discovery;
use crate::internode::join::InternodeOptions;
use crate::internode::reduce_dtype::{ReduceDtype, chosen_order, order_choice};
use crate::rank::Rank;
use crate::store::Store;
use crate::store::offload::OffloadedStore;
use crate::sync::call_site::CallSite;
use crate::transport::Transports;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

/// A group, or the error that prevented it.
pub struct GroupHandle(Result<Group>);

impl GroupHandle {
    /// Runs `body` on the group. A panic fails the group on all ranks.
    pub(super) fn with<T>(&self, body: impl FnOnce(&Group) -> Result<T>) -> Result<T> {
        let group = self.0.as_ref().map_err(Clone::clone)?;
        group.catch_panic(|| body(group))
    }

    /// Runs `body`, which returns nothing, like `with`.
    fn done(&self, body: impl FnOnce(&Group)) -> Result<()> {
        self.with(|group| {
            body(group);
            Ok(())
        })
    }

    pub(super) fn run(
        &self,
        calls: &[ffi::CallSpec],
        timeout_ms: i64,
        profiled: bool,
    ) -> ffi::Outcome {
        self.begun(calls, |group, calls| {
            group.watch(profiled);
            group.run(calls, milliseconds(timeout_ms)).map(|()| 0)
        })
    }

    pub(super) fn submit(
        &self,
        calls: &[ffi::CallSpec],
        timeout_ms: i64,
        profiled: bool,
        completion: cxx::UniquePtr<ffi::Completion>,
    ) -> ffi::Outcome {
        self.begun(calls, |group, calls| {
            group.watch(profiled);
            group.submit(calls, milliseconds(timeout_ms), from_cpp_in_turn(completion))
        })
    }

    pub(super) fn run_in_turn(&self, calls: &[ffi::CallSpec], timeout_ms: i64) -> ffi::Outcome {
        self.begun(calls, |group, calls| {
            group.run_in_turn(calls, milliseconds(timeout_ms)).map(|()| 0)
        })
    }

    pub(super) fn examine(&self, calls: &[ffi::CallSpec]) -> ffi::Outcome {
        self.begun(calls, |_, _| Ok(0))
    }

    /// Converts `calls` and passes them to `begin`, which returns a ticket, unless inputs must be
    /// copied first. A panic fails the group on all ranks.
    fn begun(
        &self,
        calls: &[ffi::CallSpec],
        begin: impl FnOnce(&Group, &[Call<'_>]) -> Result<u64>,
    ) -> ffi::Outcome {
        let mut outcome = ffi::Outcome {
            status: outcome::status(Ok(())),
            sequence: 0,
            ticket: 0,
            asides: Vec::new(),
        };
        outcome.status = guarded(|| {
            self.with(|group| {
                let place = group.place();
                outcome.sequence = group.sequence() + 1;
                with_specs(calls, |specs| {
                    let asides = alias::overwritten(specs, place.0).into_iter();
                    outcome.asides = asides
                        .map(|alias::Aside { call, input }| ffi::Aside { call, input })
                        .collect();
                    if outcome.asides.is_empty() {
                        outcome.ticket = with_calls(specs, place, |calls| begin(group, calls))?;
                    }
                    Ok(())
                })
            })
        });
        outcome
    }

    pub(super) fn send(
        &self,
        transfer: &ffi::MessageSpec,
        completion: cxx::UniquePtr<ffi::Completion>,
    ) -> u64 {
        let completion = from_cpp(completion);
        started(
            |completion| self.with(|group| group.send(message(transfer)?, completion)),
            completion,
        )
    }

    pub(super) fn recv(
        &self,
        transfer: &ffi::MessageSpec,
        completion: cxx::UniquePtr<ffi::Completion>,
    ) -> u64 {
        let completion = from_cpp(completion);
        started(
            |completion| self.with(|group| group.recv(message(transfer)?, completion)),
            completion,
        )
    }

    pub(super) fn wait(&self, ticket: u64, timeout_ms: i64) -> ffi::Status {
        guarded(|| self.with(|group| group.wait(ticket, milliseconds(timeout_ms))))
    }

    pub(super) fn progress(&self) {
        guarded(|| self.done(|group| group.progress()));
    }

    pub(super) fn monitored_barrier(
        &self,
        timeout_ms: i64,
        wait_all_ranks: bool,
        call_site: u32,
    ) -> ffi::Status {
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        guarded(|| {
            self.with(|group| {
                group.monitored_barrier(timeout, wait_all_ranks, CallSite::known(call_site))
            })
        })
    }

    pub(super) fn compare_operators(&self, call: &str) -> ffi::Status {
        guarded(|| self.with(|group| group.compare_operators(call)))
    }

    pub(super) fn reject(&self, text: &str) {
        guarded(|| self.done(|group| group.reject(text.to_owned())));
    }

    pub(super) fn reject_operator(&self, text: &str) {
        guarded(|| self.done(|group| group.reject_operator(text.to_owned())));
    }

    pub(super) fn reject_message(&self, transfer: &ffi::MessageSpec, text: &str) {
        let peer = u32::try_from(transfer.peer).ok().map(Rank);
        guarded(|| {
            self.done(|group| {
                group.reject_message(transfer.send, peer, transfer.tag, text.to_owned())
            })
        });
    }

    pub(super) fn abort(&self) {
        guarded(|| self.done(|group| group.abort()));
    }

    pub(super) fn shutdown(&self) {
        guarded(|| self.done(|group| group.shutdown()));
    }

    pub(super) fn leave(&self, limit_ms: i64, farewell: &str) {
        guarded(|| {
            self.done(|group| group.destroy(milliseconds(limit_ms).unwrap_or_default(), farewell))
        });
    }

    pub(super) fn sequence(&self) -> u64 {
        self.with(|group| Ok(group.sequence())).unwrap_or(0)
    }

    pub(super) fn set_timeout(&self, timeout_ms: i64) {
        if let Some(timeout) = milliseconds(timeout_ms) {
            // A group that could not be joined has no timeout.
            guarded(|| self.done(|group| group.set_timeout(timeout)));
        }
    }

    pub(super) fn device(&self) -> i32 {
        let mut device = -1;
        guarded(|| self.done(|group| device = group.device().unwrap_or(-1)));
        device
    }

    pub(super) fn timeout(&self) -> i64 {
        self.with(|group| Ok(group.timeout().as_millis() as i64)).unwrap_or(0)
    }

    pub(super) fn error(&self) -> ffi::Status {
        guarded(|| self.with(|group| group.error().map_or(Ok(()), Err)))
    }

    pub(super) fn failure(&self) -> ffi::Status {
        guarded(|| self.with(|group| group.failure().map_or(Ok(()), Err)))
    }
}

pub(super) fn join(
    store: cxx::UniquePtr<ffi::StoreHandle>,
    transports: cxx::SharedPtr<ffi::TransportsHandle>,
    spec: &ffi::JoinSpec,
) -> ffi::JoinResult {
    let mut group = Err(Error::internal("the group was never joined"));
    let status = guarded(|| {
        let options = JoinOptions {
            order: chosen_order(&spec.order, Config::get().order, spec.is_default)?,
            group: spec.group.clone(),
            rank: spec.rank,
            size: spec.size,
            global_ranks: spec.global_ranks.clone(),
            is_default: spec.is_default,
            timeout: milliseconds(spec.timeout_ms),
            ctas: chosen_ctas(
                &spec.cta_policy,
                spec.max_ctas,
                Config::get().ctas,
                spec.is_default,
            )?,
        };
        let store = TorchStore::new(store);
        let name = store.name()?;
        let store: Arc<dyn Store> = Arc::new(store);
        let torch = |named: &str| find_backends(&transports, named);
        let choice = discovery::connects(&spec.inter_node_backend, &options, torch)?;
        let partials = ReduceDtype::chosen(&spec.reduce_dtype, options.order, spec.is_default)?;
        let connecting = |backend: &str| {
            Arc::new(TorchTransports::new(&transports, backend)) as Arc<dyn Transports>
        };
        let worker = OffloadedStore::new(Arc::clone(&store), name)?;
        group = Group::join(
            &worker,
            &options,
            Some(&InternodeOptions {
                choice,
                reduce_dtype: partials,
                store: &store,
                transports: &connecting,
            }),
        );
        // Dropped before the result is used: the worker's thread has then finished its operation,
        // or abandoned it.
        drop(worker);
        group.as_ref().map(|_| ()).map_err(Clone::clone)
    });
    ffi::JoinResult { status, group: Box::new(GroupHandle(group)) }
}

pub(super) fn check_choices(spec: &ffi::JoinSpec) -> ffi::Status {
    guarded(|| {
        order_choice(&spec.order)?;
        ReduceDtype::choice(&spec.reduce_dtype)?;
        cta_choice(&spec.cta_policy, spec.max_ctas).map(|_| ())
    })
}

/// Reinterprets spans of C++ as spans of the core, which have the same layout.
fn spans(list: &[ffi::Span]) -> &[Span] {
    const {
        assert!(
            size_of::<ffi::Span>() == size_of::<Span>()
                && align_of::<ffi::Span>() == align_of::<Span>()
        )
    }
    const {
        assert!(
            offset_of!(ffi::Span, addr) == offset_of!(Span, addr)
                && offset_of!(ffi::Span, bytes) == offset_of!(Span, bytes)
        )
    }
    // SAFETY: both are `repr(C)` structs with the same fields, as the constants above have checked.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), list.len()) }
}

/// Returns the arguments in `spec`.
fn translate<'a>(spec: &ffi::CallSpec<'a>) -> Result<CallSpec<'a>> {
    let op = Collective::from_code(spec.op.repr)
        .ok_or_else(|| Error::value(format!("collective code {} is unknown", spec.op.repr)))?;
    let reduce_op = ReduceOp::from_torch(spec.reduce_op)?;
    Ok(CallSpec {
        op,
        dtype: if op.reduces() {
            DType::combined(spec.dtype, reduce_op)?
        } else {
            DType::copied(spec.dtype)?
        },
        reduce_op,
        root: Rank(
            u32::try_from(spec.root)
                .map_err(|_| Error::value(format!("root {} is negative", spec.root)))?,
        ),
        factor: spec.factor,
        inputs: spans(spec.inputs).into(),
        outputs: spans(spec.outputs).into(),
        call_site: CallSite::known(spec.call_site),
        compares: None,
    })
}

/// Runs `body` on the arguments of `calls`; a single call allocates no memory.
pub(super) fn with_specs<T>(
    calls: &[ffi::CallSpec],
    body: impl FnOnce(&[CallSpec<'_>]) -> Result<T>,
) -> Result<T> {
    match calls {
        [one] => body(&[translate(one)?]),
        several => body(&several.iter().map(translate).collect::<Result<Vec<_>>>()?),
    }
}

/// Runs `body` on the calls of `specs` for rank `me` of `n`; a single call allocates no memory.
pub(super) fn with_calls<T>(
    specs: &[CallSpec<'_>],
    (me, n): (Rank, usize),
    body: impl FnOnce(&[Call<'_>]) -> Result<T>,
) -> Result<T> {
    fn call<'a>(spec: &CallSpec<'a>, me: Rank, n: usize) -> Result<Call<'a>> {
        // SAFETY: the spans belong to tensors that `Operation` owns until the call has ended.
        // Inputs overlap outputs only in place: `GroupHandle::begun` has checked that, or those
        // inputs were copied before the calls were made.
        unsafe { Call::new(spec.clone(), me, n) }
    }
    match specs {
        [one] => body(&[call(one, me, n)?]),
        several => body(&several.iter().map(|spec| call(spec, me, n)).collect::<Result<Vec<_>>>()?),
    }
}

pub(super) fn message(transfer: &ffi::MessageSpec) -> Result<Message> {
    let spec = MessageSpec {
        peer: u32::try_from(transfer.peer).ok().map(Rank),
        tag: transfer.tag,
        dtype: DType::copied(transfer.dtype)?,
        span: Span { addr: transfer.span.addr, bytes: transfer.span.bytes },
        timeout: milliseconds(transfer.timeout_ms),
    };
    // SAFETY: the span belongs to a tensor that its C++ work owns until the completion is called,
    // or until the stream has passed the transfer. Users of torch do not access it until then.
    Ok(unsafe { Message::new(spec) })
}
