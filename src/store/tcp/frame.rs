//! Frames between a client and a server after authentication: a 4-byte length, then a body.

use super::limits::MAX_FRAME;
use crate::error::{Error, ErrorKind, Result};
use crate::store::request::{MessageReader, Request};
use crate::store::table::TableReply;
use bytes::Bytes;
use std::time::Duration;

/// Size of the length before the body.
pub const LENGTH: usize = 4;

/// A value of this size or more is sent from where it is stored, without a copy.
const APART: usize = 16 * 1024;

/// A message of a client.
#[derive(Debug, PartialEq, Eq)]
pub enum ClientFrame<'a> {
    /// A request and its limit.
    Call(Duration, Request<'a>),
    /// Reports that one more worker has joined; the master may wait until enough have.
    Join,
}

impl<'a> ClientFrame<'a> {
    /// Decodes a body.
    pub fn decode(body: &'a [u8]) -> Result<Self> {
        let mut fields = MessageReader(body);
        match fields.u8()? {
            1 => {
                let limit = Duration::from_millis(u64::from(fields.u32()?));
                Ok(Self::Call(limit, Request::decode(fields.0)?))
            }
            2 => fields.end().map(|()| Self::Join),
            other => Err(Error::value(format!("message {other} is unknown"))),
        }
    }

    /// Replaces `out` with the whole frame. `Value` if it is longer than a server accepts.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        out.extend_from_slice(&[0; LENGTH]);
        match self {
            Self::Call(limit, request) => {
                request.check()?;
                let length = 5 + request.encoded_len();
                if length > MAX_FRAME {
                    return Err(Error::value(format!(
                        "{:?} of {length} bytes; a store takes at most {MAX_FRAME} at once",
                        request.op
                    )));
                }
                out.push(1);
                out.extend_from_slice(
                    &u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).to_le_bytes(),
                );
                request.encode(out);
            }
            Self::Join => out.push(2),
        }
        let length = (out.len() - LENGTH) as u32;
        out[..LENGTH].copy_from_slice(&length.to_le_bytes());
        Ok(())
    }
}

/// An answer of the server.
#[derive(Debug, PartialEq, Eq)]
pub enum ServerFrame {
    /// The reply of the store.
    Done(TableReply),
    /// The time is over, and the keys with these indices do not exist.
    Missing(Vec<usize>),
    /// The message was rejected.
    Failed(Error),
}

impl ServerFrame {
    /// Encodes the whole frame, in pieces to be sent in order.
    pub fn encode(&self) -> Vec<Bytes> {
        let mut pieces = FrameBuilder { done: Vec::new(), open: vec![0; LENGTH], length: 0 };
        match self {
            Self::Done(TableReply::Unit) => pieces.put(&[0]),
            Self::Done(TableReply::Flag(flag)) => pieces.put(&[1, u8::from(*flag)]),
            Self::Done(TableReply::Number(number)) => {
                pieces.put(&[2]);
                pieces.put(&number.to_le_bytes());
            }
            Self::Done(TableReply::Value(value)) => {
                pieces.put(&[3]);
                pieces.put_value(value);
            }
            Self::Done(TableReply::Values(values)) => {
                pieces.put(&[4]);
                pieces.put(&(values.len() as u32).to_le_bytes());
                for value in values {
                    pieces.put_value(value);
                }
            }
            Self::Done(TableReply::Keys(keys)) => {
                pieces.put(&[5]);
                pieces.put(&(keys.len() as u32).to_le_bytes());
                for key in keys {
                    pieces.put(&(key.len() as u32).to_le_bytes());
                    pieces.put(key.as_bytes());
                }
            }
            Self::Missing(indices) => {
                pieces.put(&[6]);
                for index in indices {
                    pieces.put(&(*index as u32).to_le_bytes());
                }
            }
            Self::Failed(error) => {
                pieces.put(&[7, error.kind as u8]);
                pieces.put(error.message.as_bytes());
            }
        }
        pieces.finish()
    }

    /// Returns the length of the body, which must not exceed [`MAX_FRAME`].
    pub fn encoded_len(&self) -> usize {
        1 + match self {
            Self::Done(TableReply::Unit) => 0,
            Self::Done(TableReply::Flag(_)) => 1,
            Self::Done(TableReply::Number(_)) => 8,
            Self::Done(TableReply::Value(value)) => 4 + value.len(),
            Self::Done(TableReply::Values(values)) => {
                4 + values.iter().map(|value| 4 + value.len()).sum::<usize>()
            }
            Self::Done(TableReply::Keys(keys)) => {
                4 + keys.iter().map(|key| 4 + key.len()).sum::<usize>()
            }
            Self::Missing(indices) => 4 * indices.len(),
            Self::Failed(error) => 1 + error.message.len(),
        }
    }

    /// Decodes a body; the values share its memory.
    pub fn decode(body: &Bytes) -> Result<Self> {
        let mut fields = MessageReader(body);
        let answer = match fields.u8()? {
            0 => Self::Done(TableReply::Unit),
            1 => Self::Done(TableReply::Flag(fields.u8()? != 0)),
            2 => Self::Done(TableReply::Number(i64::from_le_bytes(fields.array()?))),
            3 => Self::Done(TableReply::Value(body.slice_ref(fields.bytes()?))),
            4 => {
                let count = fields.u32()?;
                Self::Done(TableReply::Values(
                    (0..count)
                        .map(|_| fields.bytes().map(|value| body.slice_ref(value)))
                        .collect::<Result<_>>()?,
                ))
            }
            5 => {
                let count = fields.u32()?;
                let keys =
                    (0..count).map(|_| Ok(String::from_utf8_lossy(fields.bytes()?).into_owned()));
                Self::Done(TableReply::Keys(keys.collect::<Result<_>>()?))
            }
            6 => {
                let mut indices = Vec::new();
                while !fields.0.is_empty() {
                    indices.push(fields.u32()? as usize);
                }
                Self::Missing(indices)
            }
            7 => {
                let kind = ErrorKind::from_code(fields.u8()?).unwrap_or(ErrorKind::Internal);
                let message = String::from_utf8_lossy(std::mem::take(&mut fields.0)).into_owned();
                Self::Failed(Error { kind, message })
            }
            other => return Err(Error::internal(format!("answer {other} is unknown"))),
        };
        fields.end()?;
        Ok(answer)
    }
}

/// A frame under construction.
struct FrameBuilder {
    done: Vec<Bytes>,
    open: Vec<u8>,
    length: usize,
}

impl FrameBuilder {
    fn put(&mut self, bytes: &[u8]) {
        self.open.extend_from_slice(bytes);
        self.length += bytes.len();
    }

    fn put_value(&mut self, value: &Bytes) {
        self.put(&(value.len() as u32).to_le_bytes());
        if value.len() < APART {
            return self.put(value);
        }
        self.done.push(std::mem::take(&mut self.open).into());
        self.done.push(value.clone());
        self.length += value.len();
    }

    fn finish(mut self) -> Vec<Bytes> {
        let length = (self.length as u32).to_le_bytes();
        match self.done.first_mut() {
            None => self.open[..LENGTH].copy_from_slice(&length),
            Some(first) => {
                let mut head = first.to_vec();
                head[..LENGTH].copy_from_slice(&length);
                *first = head.into();
            }
        }
        if !self.open.is_empty() {
            self.done.push(self.open.into());
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::request::StoreOp;

    #[test]
    fn answers_come_back_and_no_prefix_is_taken_for_one() {
        let large = Bytes::from(vec![3; APART + 1]);
        for answer in [
            ServerFrame::Done(TableReply::Unit),
            ServerFrame::Done(TableReply::Flag(true)),
            ServerFrame::Done(TableReply::Number(-5)),
            ServerFrame::Done(TableReply::Value(large.clone())),
            ServerFrame::Done(TableReply::Values(vec![
                Bytes::new(),
                large.clone(),
                Bytes::from_static(b"x"),
                large,
            ])),
            ServerFrame::Done(TableReply::Keys(vec![String::new(), "schlüssel".into()])),
            ServerFrame::Missing(vec![0, 7]),
            ServerFrame::Failed(Error::queue_empty("queue is empty")),
        ] {
            let frame = Bytes::from(answer.encode().concat());
            let body = frame.slice(LENGTH..);
            assert_eq!(frame[..LENGTH], (body.len() as u32).to_le_bytes());
            assert_eq!(body.len(), answer.encoded_len());
            assert_eq!(ServerFrame::decode(&body).as_ref(), Ok(&answer));
            if !matches!(answer, ServerFrame::Missing(_) | ServerFrame::Failed(_)) {
                assert!(
                    (0..body.len())
                        .step_by(1 + body.len() / 100)
                        .all(|length| ServerFrame::decode(&body.slice(..length)).is_err())
                );
            }
        }
    }

    #[test]
    fn messages_come_back_and_long_ones_are_refused() -> Result<()> {
        let mut frame = Vec::new();
        let call = ClientFrame::Call(
            Duration::from_millis(7),
            Request::new(StoreOp::Set, vec!["k"], vec![b"v"]),
        );
        for message in [call, ClientFrame::Join] {
            message.encode(&mut frame)?;
            assert_eq!(ClientFrame::decode(&frame[LENGTH..])?, message);
            assert!(
                (LENGTH..frame.len())
                    .all(|length| ClientFrame::decode(&frame[LENGTH..length]).is_err())
            );
        }
        let long = vec![0; MAX_FRAME];
        assert!(
            ClientFrame::Call(Duration::ZERO, Request::new(StoreOp::Set, vec!["k"], vec![&long]))
                .encode(&mut frame)
                .is_err()
        );
        Ok(())
    }
}
