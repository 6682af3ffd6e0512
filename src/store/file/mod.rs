//! A store in a file that its users share: processes of one node, or of several nodes with a shared
//! file system.
//!
//! - [`log`], `format`, `scan`, `source`: the bytes, an append-only log of requests whose replay
//!   yields a [`KeyTable`](super::table::KeyTable)
//! - `log_file`, `path`: the open file with its locks, and opening it safely
//! - `lifecycle`: joining and leaving; `client`: one user and its requests; `backoff`: pauses
//!   between polls
//!
//! Acknowledged writes survive the death of any user at any instruction, but not a crash of the
//! node: nothing is synced.

mod backoff;
mod client;
mod format;
mod lifecycle;
pub mod log;
mod log_file;
mod path;
mod scan;
mod source;

use super::Store;
use super::request::Request;
use super::table::TableReply;
use crate::error::Result;
use client::FileClient;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A key-value store in a file. Clones share it. The last user to leave removes the file, if
/// `world_size` users have joined.
#[derive(Clone)]
pub struct FileStore(Arc<FileClient>);

impl FileStore {
    /// Joins the users of the store at `path`, which is created if the file does not exist or is
    /// empty.
    ///
    /// Each call adds one user. The last user to leave removes the file if at least `world_size`
    /// users have joined in all; before that, the file keeps its contents for later users. The
    /// first user of a new run discards what a killed run has left.
    ///
    /// `Config` if the directory does not exist, if all users may replace files in it, if the
    /// file is not a regular file with mode 0600 that belongs to this user, or if it is damaged;
    /// `Timeout` if another process holds its lock for 300 s.
    pub fn open(path: &Path, world_size: u32) -> Result<Self> {
        Ok(Self(Arc::new(FileClient::join(path, world_size, None)?)))
    }

    /// Joins like [`open`](Self::open), waiting for the lock until `limit` has passed.
    pub fn open_within(path: &Path, world_size: u32, limit: Duration) -> Result<Self> {
        Ok(Self(Arc::new(FileClient::join(path, world_size, Some(limit))?)))
    }

    /// Returns the path of the file, as given.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Store for FileStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        self.0.call(request, limit)
    }
}
