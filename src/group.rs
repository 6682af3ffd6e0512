//! A group of ranks: ties the crate together; the only thing the bridge talks to.

use crate::coll::call::{Call, Span};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::Store;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Who joins which group.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The group's name, the same on all members.
    pub group: String,
    /// This process's place in it; checked by `join`.
    pub rank: i32,
    /// Number of members; checked by `join`.
    pub size: i32,
    /// Ranks of the members in the default group; empty: the same as here.
    pub global_ranks: Vec<i32>,
    /// Limit of joining, and of every later call that brings none; absent: 30 minutes.
    pub timeout: Option<Duration>,
}

/// One send or receive.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank; `None` receives from any.
    pub peer: Option<Rank>,
    /// Matches the other side's.
    pub tag: i32,
    /// Element type, for messages about a mismatch.
    pub dtype: DType,
    /// What is sent or filled.
    pub span: Span,
    /// Limit; absent: the group's.
    pub timeout: Option<Duration>,
}

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
        let callback = self
            .0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .take();
        if let Some(callback) = callback {
            callback(outcome, source);
        }
    }
}

/// A joined group.
pub struct Group {}

#[allow(missing_docs, unused_variables)]
impl Group {
    pub fn join(store: &dyn Store, options: &JoinOptions) -> Result<Self> {
        Err(Error::internal("being written"))
    }
    pub fn run(&self, calls: Vec<Call>, timeout: Option<Duration>) -> Result<()> {
        Err(Error::internal("being written"))
    }
    pub fn submit(&self, calls: Vec<Call>, timeout: Option<Duration>, done: Done) -> Result<u64> {
        Err(Error::internal("being written"))
    }
    pub fn send(&self, message: Message, done: Done) -> Result<u64> {
        Err(Error::internal("being written"))
    }
    pub fn recv(&self, message: Message, done: Done) -> Result<u64> {
        Err(Error::internal("being written"))
    }
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        Err(Error::internal("being written"))
    }
    pub fn progress(&self) {}
    pub fn monitored_barrier(&self, timeout: Option<Duration>, wait_all_ranks: bool) -> Result<()> {
        Err(Error::internal("being written"))
    }
    pub fn abort(&self) {}
    pub fn shutdown(&self) {}
    pub fn sequence(&self) -> u64 {
        0
    }
    pub fn set_timeout(&self, timeout: Duration) {}
    pub fn timeout(&self) -> Duration {
        Duration::ZERO
    }
    pub fn error(&self) -> Option<Error> {
        None
    }
}
