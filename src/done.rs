//! Where the outcome of an asynchronous call goes.

use crate::error::Result;
use crate::rank::Rank;
use std::sync::{Arc, Mutex, PoisonError};

type Callback = Box<dyn FnOnce(Result<()>, Option<Rank>) + Send>;

/// Where the outcome of an asynchronous call goes. Clones share the one callback; the first call wins.
#[derive(Clone)]
pub struct Done(Arc<Mutex<Option<Callback>>>);

impl Done {
    /// Wraps `callback`, which gets the outcome and, for a receive, the rank that sent.
    pub fn new(callback: impl FnOnce(Result<()>, Option<Rank>) + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(callback)))))
    }

    /// Delivers the outcome; without effect after the first time.
    pub fn call(&self, outcome: Result<()>, source: Option<Rank>) {
        let callback = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(callback) = callback {
            callback(outcome, source);
        }
    }
}
