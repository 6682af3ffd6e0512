//! A part of another store, selected by a prefix.

use super::Store;
use super::request::Request;
use super::table::TableReply;
use crate::error::Result;
use std::time::Duration;

/// The keys of `store` that start with `prefix` and a slash. As in c10d, `num_keys` counts all keys
/// of `store`.
pub struct PrefixStore<S> {
    prefix: String,
    store: S,
}

impl<S> PrefixStore<S> {
    /// Returns the part of `store` under `prefix`.
    pub fn new(prefix: &str, store: S) -> Self {
        Self { prefix: format!("{prefix}/"), store }
    }
}

impl<S: Store> Store for PrefixStore<S> {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        let keys: Vec<String> =
            request.keys.iter().map(|key| format!("{}{key}", self.prefix)).collect();
        let reply = self
            .store
            .call(&request.with_keys(keys.iter().map(String::as_str).collect()), limit)?;
        if let TableReply::Keys(keys) = &reply {
            return Ok(TableReply::Keys(
                keys.iter()
                    .filter_map(|key| key.strip_prefix(&self.prefix))
                    .map(str::to_owned)
                    .collect(),
            ));
        }
        Ok(reply)
    }
}

/// A reference to a store is a store.
impl<S: Store + ?Sized> Store for &S {
    fn call(&self, request: &Request<'_>, limit: Option<Duration>) -> Result<TableReply> {
        (**self).call(request, limit)
    }
}
