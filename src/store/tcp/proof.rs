//! Mutual authentication of a client and a server that share a secret, without revealing it.
//!
//! The server opens with a fresh nonce. The client answers with its own nonce and, if there is a
//! secret, an HMAC-SHA256 over both nonces. The server closes the connection or answers with an
//! HMAC of its own. Each proof is valid for one connection only, so it cannot be replayed. The
//! frames that follow are not encrypted.

use crate::error::{Error, Result};
use crate::sys::random;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The first bytes in either direction. The digit is the protocol's version.
const MAGIC: &[u8; 8] = b"symmkv1\n";

/// Length of a nonce and of a proof.
const WIDTH: usize = 32;

/// Length of the server's opening: magic, a flag for "proof required", nonce.
pub const OPENING: usize = 8 + 1 + WIDTH;

/// Length of the client's hello: magic, a flag for "with proof", nonce, proof.
pub const HELLO: usize = 8 + 1 + WIDTH + WIDTH;

/// Length of the server's answer: a flag for "admitted", proof.
pub const ADMISSION: usize = 1 + WIDTH;

/// A value used once.
pub type Nonce = [u8; WIDTH];

/// The side that sends a proof. The proof covers the side, so a proof of one side is not valid for
/// the other.
#[derive(Clone, Copy)]
enum ProofSide {
    Client,
    Server,
}

fn mac(secret: &[u8], side: ProofSide, server: &Nonce, client: &Nonce) -> Result<Hmac<Sha256>> {
    // HMAC accepts keys of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret)
        .map_err(|error| Error::internal(error.to_string()))?;
    mac.update(match side {
        ProofSide::Client => b"symm store client",
        ProofSide::Server => b"symm store server",
    });
    mac.update(server);
    mac.update(client);
    Ok(mac)
}

/// Compares in constant time.
fn holds(secret: &[u8], side: ProofSide, server: &Nonce, client: &Nonce, proof: &[u8]) -> bool {
    mac(secret, side, server, client).is_ok_and(|mac| mac.verify_slice(proof).is_ok())
}

fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    let length = N.min(bytes.len());
    array[..length].copy_from_slice(&bytes[..length]);
    array
}

/// Returns the server's opening of a connection, and the nonce in it.
pub fn opening(secret: bool) -> Result<([u8; OPENING], Nonce)> {
    let nonce = random::bytes()?;
    Ok((fixed(&[&MAGIC[..], &[u8::from(secret)], &nonce].concat()), nonce))
}

/// Why a server does not admit a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthError {
    /// The peer speaks another protocol.
    Foreign,
    /// The peer has no secret, but the server has one.
    Without,
    /// The proof was made with another secret or for another connection.
    Wrong,
    /// The peer has a secret, but the server has none.
    Needless,
}

/// Returns the server's answer to a client's hello.
pub fn admit(
    secret: Option<&[u8]>,
    server: &Nonce,
    hello: &[u8; HELLO],
) -> std::result::Result<[u8; ADMISSION], AuthError> {
    if !hello.starts_with(MAGIC) {
        return Err(AuthError::Foreign);
    }
    let client: Nonce = fixed(&hello[9..9 + WIDTH]);
    let Some(secret) = secret else {
        return if hello[8] == 0 { Ok(fixed(&[1])) } else { Err(AuthError::Needless) };
    };
    if hello[8] != 1 {
        return Err(AuthError::Without);
    }
    if !holds(secret, ProofSide::Client, server, &client, &hello[9 + WIDTH..]) {
        return Err(AuthError::Wrong);
    }
    let proof = mac(secret, ProofSide::Server, server, &client)
        .map_err(|_| AuthError::Wrong)?
        .finalize()
        .into_bytes();
    Ok(fixed(&[&[1], &proof[..]].concat()))
}

/// Returns true if the bytes received so far can still become a hello.
pub fn plausible(start: &[u8]) -> bool {
    let length = start.len().min(MAGIC.len());
    start[..length] == MAGIC[..length]
}

/// Returns the last message of a client that has a secret where the server has none, or the
/// reverse, so that the server can log the mismatch, too.
pub fn farewell(secret: bool) -> [u8; HELLO] {
    fixed(&[&MAGIC[..], &[u8::from(secret)]].concat())
}

/// The state of a client after the server's opening.
pub struct ClientHello {
    server: Nonce,
    client: Nonce,
}

impl ClientHello {
    /// Reads the server's opening and returns the client's hello. Errors describe the server
    /// without its name.
    pub fn answer(opening: &[u8; OPENING], secret: Option<&[u8]>) -> Result<(Self, [u8; HELLO])> {
        if !opening.starts_with(MAGIC) {
            return Err(Error::network(
                "what listens there is not a torch-symm store of this version",
            ));
        }
        match (opening[8], secret) {
            (0, Some(_)) => {
                return Err(Error::config(
                    "it does not ask for the secret that this client was given: it is not the \
                     store that was meant",
                ));
            }
            (0, None) => {}
            (_, None) => {
                return Err(Error::config("it asks for a secret, and this client was given none"));
            }
            (_, Some(_)) => {}
        }
        let server = fixed(&opening[9..]);
        let client = random::bytes()?;
        let mut hello: [u8; HELLO] =
            fixed(&[&MAGIC[..], &[u8::from(secret.is_some())], &client].concat());
        if let Some(secret) = secret {
            let proof = mac(secret, ProofSide::Client, &server, &client)?.finalize().into_bytes();
            hello[9 + WIDTH..].copy_from_slice(&proof);
        }
        Ok((Self { server, client }, hello))
    }

    /// Succeeds if the server admits this client and, if there is a secret, has proven that it
    /// knows the secret.
    pub fn admitted(&self, admission: &[u8; ADMISSION], secret: Option<&[u8]>) -> Result<()> {
        let proven = secret.is_none_or(|secret| {
            holds(secret, ProofSide::Server, &self.server, &self.client, &admission[1..])
        });
        if admission[0] == 1 && proven {
            Ok(())
        } else {
            Err(Error::config("it does not know the secret that this client was given"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet(server: Option<&[u8]>, client: Option<&[u8]>) -> Result<()> {
        let (words, nonce) = opening(server.is_some())?;
        let (introduction, hello) = ClientHello::answer(&words, client)?;
        let admission = admit(server, &nonce, &hello)
            .map_err(|refusal| Error::config(format!("{refusal:?}")))?;
        introduction.admitted(&admission, client)
    }

    #[test]
    fn both_sides_must_know_the_same_secret() {
        assert_eq!(meet(None, None), Ok(()));
        assert_eq!(meet(Some(b"s"), Some(b"s")), Ok(()));
        assert!(meet(Some(b"s"), Some(b"t")).is_err());
        assert!(meet(Some(b"s"), None).is_err());
        assert!(meet(None, Some(b"s")).is_err());
    }

    #[test]
    fn a_proof_serves_one_connection() -> Result<()> {
        let (words, nonce) = opening(true)?;
        let (introduction, hello) = ClientHello::answer(&words, Some(b"s"))?;
        let admission =
            admit(Some(b"s"), &nonce, &hello).map_err(|_| Error::internal("refused"))?;
        let (again, other) = opening(true)?;
        assert_eq!(admit(Some(b"s"), &other, &hello), Err(AuthError::Wrong));
        let (fresh, _) = ClientHello::answer(&again, Some(b"s"))?;
        assert!(introduction.admitted(&admission, Some(b"s")).is_ok());
        assert!(fresh.admitted(&admission, Some(b"s")).is_err());
        // The server's own proof, sent back to it.
        let mut echo = hello;
        echo[9 + WIDTH..].copy_from_slice(&admission[1..]);
        assert_eq!(admit(Some(b"s"), &nonce, &echo), Err(AuthError::Wrong));
        assert_eq!(admit(None, &nonce, &[b'G'; HELLO]), Err(AuthError::Foreign));
        assert_eq!(admit(Some(b"s"), &nonce, &farewell(false)), Err(AuthError::Without));
        assert_eq!(admit(None, &nonce, &farewell(true)), Err(AuthError::Needless));
        Ok(())
    }
}
