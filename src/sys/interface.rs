//! Addresses of this node's network interfaces.
#![allow(unsafe_code, reason = "a list that the C library allocates")]

use crate::error::{Error, Result};
use rustix::io::Errno;
use std::ffi::CStr;
use std::net::IpAddr;

/// Returns the addresses of the interface `name` in the kernel's order; none if the interface does
/// not exist.
pub fn addresses(name: &str) -> Result<Vec<IpAddr>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is valid for a write.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(Error::os(
            "getifaddrs",
            Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOMEM),
        ));
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: `next` is null or an entry of the list, which is freed only below.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: every entry has a name that ends with a zero byte.
        let named = unsafe { CStr::from_ptr(entry.ifa_name) }.to_bytes() == name.as_bytes();
        if named {
            // SAFETY: `ifa_addr` is null or the address of this entry.
            found.extend(unsafe { address(entry.ifa_addr) });
        }
        next = entry.ifa_next;
    }
    // SAFETY: `list` came from `getifaddrs`, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// Returns the IP address in `socket`, if it is one.
///
/// # Safety
/// `socket` is null or points to a socket address whose length matches its family.
unsafe fn address(socket: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as the caller promises; every address starts with the family.
    match i32::from(unsafe { socket.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a `sockaddr_in`; the list aligns it for any.
            let bits =
                unsafe { socket.cast::<libc::sockaddr_in>().read_unaligned() }.sin_addr.s_addr;
            Some(IpAddr::from(bits.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a `sockaddr_in6`.
            Some(IpAddr::from(
                unsafe { socket.cast::<libc::sockaddr_in6>().read_unaligned() }.sin6_addr.s6_addr,
            ))
        }
        _ => None,
    }
}
