//! A store in a file that its users share: processes of one host, or of several with a shared file system.
//!
//! - [`log`], `format`, `scan`, `source`: the bytes, an append-only log of requests whose replay gives a [`Table`](super::table::Table)
//! - `disk`, `place`: the open file with its locks, and opening it safely
//! - `users`: those who come and go; `user`: one of them and its requests; `wait`: pauses between looks
//!
//! What was acknowledged survives the death of any user at any instruction, though not that of the host: nothing is synced.

mod disk;
mod format;
pub mod log;
mod path;
mod scan;
mod source;
mod user;
mod users;
mod wait;

use super::Store;
use super::request::Request;
use super::table::Reply;
use crate::error::Result;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use user::User;

/// A key-value store in a file. Clones share it; the last of all users, if `world_size` have come, removes the file.
#[derive(Clone)]
pub struct FileStore(Arc<User>);

impl FileStore {
    /// A user of the store at `path`, which is made if nothing, or an empty file, is there.
    ///
    /// Each call is one user. The last one to leave removes the file if at least `world_size` have ever joined; before,
    /// it keeps what it holds for those who come late. What a killed run has left is started afresh by its first user.
    ///
    /// `Config` if the folder does not exist or anybody may exchange files in it, if the file is not a regular file of
    /// this user alone (mode 0600), or if it is damaged; `Timeout` if another process holds its lock for 300 s.
    pub fn open(path: &Path, world_size: u32) -> Result<Self> {
        Ok(Self(Arc::new(User::join(path, world_size, None)?)))
    }

    /// The same, waiting for the lock until `limit` has passed.
    pub fn open_within(path: &Path, world_size: u32, limit: Duration) -> Result<Self> {
        Ok(Self(Arc::new(User::join(path, world_size, Some(limit))?)))
    }

    /// Path of the file, as given.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Store for FileStore {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<Reply> {
        self.0.call(request, limit)
    }
}
