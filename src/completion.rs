//! Receivers of the outcome of an asynchronous call.

use crate::error::Result;
use crate::lock::lock;
use crate::rank::Rank;
use std::sync::{Arc, Mutex};

type Callback = Box<dyn FnOnce(Result<()>, Option<Rank>) + Send>;

/// An observer that gets an outcome before the caller does.
pub trait Observer: Send + Sync {
    /// Reports that the call known as `number` has ended.
    fn ended(&self, number: u64, outcome: &Result<()>, source: Option<Rank>);
}

/// Copies that stand for a call's tensors, for example for tensors that are not contiguous. Both
/// functions belong to the call's turn in its queue: earlier calls may write the tensors that are
/// copied, and later calls may read those that are written.
pub trait TensorCopies: Send + Sync {
    /// Copies the inputs; has no effect after the first time.
    fn copy_in(&self);
    /// Copies the results back; has no effect after the first time.
    fn write_back(&self);
    /// Returns how many more collectives `write_back` runs in the call's turn. Every rank must
    /// return the same number and run all of them, because ranks compare how many they have called.
    fn later_calls(&self) -> usize;
}

/// The receiver of the outcome of an asynchronous call. Clones share one callback; the first call
/// wins.
#[derive(Clone)]
pub struct Completion {
    callback: Arc<Mutex<Option<Callback>>>,
    /// Separate from the callback, because wrapping the callback would allocate for every call.
    observer: Option<(Arc<dyn Observer>, u64)>,
    copies: Option<Arc<dyn TensorCopies>>,
}

impl Completion {
    /// Wraps `callback`, which gets the outcome and, for a receive, the rank that sent.
    pub fn new(callback: impl FnOnce(Result<()>, Option<Rank>) + Send + 'static) -> Self {
        let callback = Arc::new(Mutex::new(Some(Box::new(callback) as Callback)));
        Self { callback, observer: None, copies: None }
    }

    /// Makes a completion whose outcome `observer` sees first.
    pub fn observed(self, observer: Arc<dyn Observer>, number: u64) -> Self {
        Self { observer: Some((observer, number)), ..self }
    }

    /// Makes a completion of a call with these copies.
    pub fn copying(self, copies: Arc<dyn TensorCopies>) -> Self {
        Self { copies: Some(copies), ..self }
    }

    /// See [`TensorCopies::copy_in`].
    pub fn copy_in(&self) {
        if let Some(copies) = &self.copies {
            copies.copy_in();
        }
    }

    /// See [`TensorCopies::write_back`].
    pub fn write_back(&self) {
        if let Some(copies) = &self.copies {
            copies.write_back();
        }
    }

    /// See [`TensorCopies::later_calls`].
    pub fn later_calls(&self) -> usize {
        self.copies.as_ref().map_or(0, |copies| copies.later_calls())
    }

    /// Delivers the outcome; has no effect after the first time.
    pub fn call(&self, outcome: Result<()>, source: Option<Rank>) {
        let callback = lock(&self.callback).take();
        if let Some(callback) = callback {
            if let Some((observer, number)) = &self.observer {
                observer.ended(*number, &outcome, source);
            }
            callback(outcome, source);
        }
    }
}

/// A transfer that has ended, whose completion is still to be called.
pub struct FinishedTransfer {
    /// The ticket with which its caller waits.
    pub ticket: u64,
    /// The receiver of the outcome.
    pub completion: Completion,
    /// How it has ended.
    pub outcome: Result<()>,
    /// The rank that sent, if a receive has succeeded.
    pub source: Option<Rank>,
}

impl FinishedTransfer {
    /// Calls the completion. The caller must not hold a lock that the completion may take.
    pub fn complete(self) {
        self.completion.call(self.outcome, self.source);
    }
}
