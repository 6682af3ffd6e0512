//! Random bits for names and secrets.

use super::eintr::retry;
use super::required::Required;
use crate::error::{Error, Result};
use rustix::rand::{GetRandomFlags, getrandom};

/// Returns `N` random bytes; up to 256 at once are never truncated.
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = retry(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno| Required::Random.failed(errno))?;
    if filled < N {
        return Err(Error::internal(format!("getrandom gave {filled} of {N} bytes")));
    }
    Ok(bytes)
}

/// Returns `prefix` followed by 32 hexadecimal digits.
pub fn name(prefix: &str) -> Result<String> {
    Ok(bytes::<16>()?.iter().fold(String::from(prefix), |name, byte| name + &format!("{byte:02x}")))
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_are_not_alike() {
        assert_ne!(super::bytes::<16>().expect("random"), super::bytes::<16>().expect("random"));
    }
}
