//! Executes requests, or keeps them until their keys exist or their time is over.

use super::connection::{ClientPhase, SHORT};
use super::event_loop::EventLoop;
use crate::error::Error;
use crate::store::request::Request;
use crate::store::table;
use crate::store::tcp::frame::{ClientFrame, ServerFrame};
use crate::store::tcp::limits::MAX_FRAME;
use bytes::Bytes;
use std::collections::HashSet;
use std::time::{Duration, Instant};

impl EventLoop {
    /// Executes the message in a frame, or lets its sender wait.
    pub(super) fn serve(&mut self, key: usize, body: Bytes) {
        let message = match ClientFrame::decode(&body) {
            Ok(message) => message,
            Err(error) => {
                // Later bytes cannot be trusted to be a frame.
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.phase = ClientPhase::Leaving;
                }
                return self.answer(key, &ServerFrame::Failed(error));
            }
        };
        let (limit, request) = match message {
            ClientFrame::Join => {
                self.shared.join();
                return self.answer(key, &ServerFrame::Done(table::TableReply::Unit));
            }
            ClientFrame::Call(limit, request) => (limit, request),
        };
        match self.table.serve(&request, Some(&body)) {
            Ok(table::TableResult::Done(reply)) => {
                let answer = ServerFrame::Done(reply);
                // Long answers reserve memory; a request that has changed the table is answered in
                // any case.
                let length = answer.encoded_len();
                if length > MAX_FRAME {
                    let error = format!(
                        "the values are {length} bytes together; a store returns at most \
                         {MAX_FRAME} at once"
                    );
                    return self.answer(key, &ServerFrame::Failed(Error::value(error)));
                }
                if length > SHORT && !request.op.writes() && !self.reserve(key, length) {
                    return self.keep(key, body);
                }
                self.answer(key, &answer);
                if request.op.makes_keys() {
                    self.wake(&request);
                }
            }
            Ok(table::TableResult::Missing(index)) => {
                self.wait(key, request.keys[index].to_owned(), limit, body)
            }
            Err(error) => self.answer(key, &ServerFrame::Failed(error)),
        }
    }

    fn wait(&mut self, key: usize, name: String, limit: Duration, body: Bytes) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        if connection.ended {
            // The client has disconnected after its request. That event arrived with the request;
            // no other will follow.
            return self.close(key);
        }
        if connection.deadline.is_none() {
            self.deadlines.set(key, &mut connection.deadline, Some(Instant::now() + limit));
        }
        // While a request waits, it does not count against the limit `moving`. Waiting requests
        // have a limit of their own, of the same size. A request that exceeds that limit is
        // rejected, not queued.
        let long = if body.len() > SHORT { body.len() } else { 0 };
        let most = self.limits.moving.max(MAX_FRAME);
        if self.waiting_bytes + long > most {
            let error = format!(
                "a request of {long} bytes cannot wait: {} of {most} bytes of others wait already",
                self.waiting_bytes
            );
            return self.answer(key, &ServerFrame::Failed(Error::config(error)));
        }
        connection.phase = ClientPhase::Waiting { key: name.clone() };
        let reserved = std::mem::take(&mut connection.reserved);
        self.waiting.entry(name).or_default().push_back(key);
        self.keep(key, body);
        self.release(reserved);
    }

    /// Keeps the request of connection `key`. A long one counts as parked unless the connection
    /// still holds the memory it reserved.
    fn keep(&mut self, key: usize, body: Bytes) {
        if let Some(connection) = self.connections.get_mut(&key) {
            if body.len() > SHORT && connection.reserved == 0 {
                connection.parked = body.len();
                self.waiting_bytes += body.len();
            }
            connection.request = Some(body);
        }
    }

    /// Takes the request that connection `key` has kept, and ends its wait.
    pub(super) fn resume(&mut self, key: usize) -> Option<Bytes> {
        let connection = self.connections.get_mut(&key)?;
        connection.phase = ClientPhase::Open;
        self.waiting_bytes -= std::mem::take(&mut connection.parked);
        connection.request.take()
    }

    /// Serves clients that wait for a key that `request` may have created.
    fn wake(&mut self, request: &Request<'_>) {
        if self.waiting.is_empty() {
            return;
        }
        let names: HashSet<&str> = request.keys.iter().copied().collect();
        for name in names {
            for key in self.waiting.remove(name).unwrap_or_default() {
                // The connection keeps its deadline until its answer is sent.
                if let Some(body) = self.resume(key) {
                    self.serve(key, body);
                }
            }
        }
    }

    pub(super) fn answer(&mut self, key: usize, answer: &ServerFrame) {
        self.send(key, answer.encode());
    }

    /// Handles a passed deadline: a waiting client gets an answer that names the missing key, any
    /// other connection is closed.
    pub(super) fn expire(&mut self, key: usize) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let name = match &mut connection.phase {
            ClientPhase::Waiting { key } => std::mem::take(key),
            ClientPhase::Unidentified(_) => {
                let who = connection.peer();
                self.refuse(&who, "it did not introduce itself in time");
                return self.close(key);
            }
            ClientPhase::Open | ClientPhase::Leaving => return self.close(key),
        };
        self.deadlines.set(key, &mut connection.deadline, None);
        self.stop_waiting(key, &name);
        let body = self.resume(key).unwrap_or_default();
        match ClientFrame::decode(&body) {
            Ok(ClientFrame::Call(_, request)) => {
                let answer = ServerFrame::Missing(self.table.missing(&request));
                self.answer(key, &answer);
            }
            Ok(ClientFrame::Join) | Err(_) => self.close(key),
        }
    }

    /// Removes connection `key` from the queue for `name`.
    pub(super) fn stop_waiting(&mut self, key: usize, name: &str) {
        if let Some(line) = self.waiting.get_mut(name) {
            line.retain(|&other| other != key);
            if line.is_empty() {
                self.waiting.remove(name);
            }
        }
    }
}
