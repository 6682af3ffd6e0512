//! Which host this is, as far as sharing memory is concerned.

use crate::error::{Error, Result};

/// Equal for two processes exactly if they run under one kernel and see the same processes and sockets.
pub fn identity() -> Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|e| Error::config(format!("reading this host's boot id from /proc: {e}")))?;
    let namespace = |name: &str| {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}"));
        link.map(|path| path.display().to_string()).unwrap_or_else(|_| format!("{name}:?"))
    };
    Ok(format!("{} {} {}", boot.trim(), namespace("pid"), namespace("net")))
}

/// 128 random bits in hexadecimal: names that nobody can guess or meet by chance.
pub fn random_name() -> Result<String> {
    let mut bits = [0u8; 16];
    rustix::rand::getrandom(&mut bits[..], rustix::rand::GetRandomFlags::empty()).map_err(|e| Error::os("getrandom", e))?;
    Ok(bits.iter().map(|byte| format!("{byte:02x}")).collect())
}
