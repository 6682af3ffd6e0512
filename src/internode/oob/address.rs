//! Where a hub listens: at the address that Gloo uses, so that every rank that reaches the rail
//! also reaches the hub.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::tcp::address::StoreAddress;
use crate::store::tcp::listen::ListeningSockets;
use crate::sys::{interface, node_id};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

/// Returns the address at which other nodes reach this node: the address of `GLOO_SOCKET_IFNAME`,
/// or else of this node's host name, or else loopback.
///
/// # Errors
/// `Config` if that interface does not exist or has no address.
pub(super) fn own(deadline: Instant) -> Result<Vec<IpAddr>> {
    match &Config::get().gloo_interface {
        Some(names) => of_interface(names),
        None => {
            Ok(vec![of_name(&node_id::name(), deadline).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))])
        }
    }
}

/// Returns the best usable address of the interfaces `names`, which are separated by commas.
fn of_interface(names: &str) -> Result<Vec<IpAddr>> {
    let mut all = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        all.extend(interface::addresses(name)?);
    }
    let address = best(&all).ok_or_else(|| {
        Error::config(format!(
            "GLOO_SOCKET_IFNAME={names:?}: there is no such interface with an address"
        ))
    })?;
    Ok(vec![address])
}

/// Returns an address of `name` that belongs to this machine.
fn of_name(name: &str, deadline: Instant) -> Option<IpAddr> {
    let Ok(StoreAddress::Inet(found)) = StoreAddress::resolve(name, 0, deadline) else {
        return None;
    };
    // Only listening shows whether an address belongs to this machine.
    let own = |ip: &IpAddr| {
        ListeningSockets::at(&StoreAddress::Inet(vec![SocketAddr::new(*ip, 0)])).is_ok()
    };
    best(&found.iter().map(SocketAddr::ip).filter(own).collect::<Vec<_>>())
}

/// Returns the address that other nodes are most likely to reach: of the network rather than
/// loopback, IPv4 rather than IPv6. Link-local addresses are excluded, because they are meaningless
/// without an interface name.
fn best(found: &[IpAddr]) -> Option<IpAddr> {
    let usable = |ip: &&IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_unicast_link_local(),
    };
    found.iter().filter(usable).min_by_key(|ip| (ip.is_loopback(), ip.is_ipv6())).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_come_before_loopback_and_links_do_not_count() {
        let ips = |texts: &[&str]| {
            texts.iter().map(|text| text.parse().expect("an address")).collect::<Vec<IpAddr>>()
        };
        let chosen = |texts: &[&str]| best(&ips(texts)).map(|ip| ip.to_string());
        assert_eq!(
            chosen(&["127.0.1.1", "fe80::1", "2001:db8::7", "10.0.0.5"]).as_deref(),
            Some("10.0.0.5")
        );
        assert_eq!(
            chosen(&["127.0.1.1", "fe80::1", "2001:db8::7"]).as_deref(),
            Some("2001:db8::7")
        );
        assert_eq!(chosen(&["::1", "127.0.0.1"]).as_deref(), Some("127.0.0.1"));
        assert_eq!(chosen(&["fe80::1", "169.254.3.4", "0.0.0.0"]), None);
    }

    #[test]
    fn interfaces_are_found_by_name() {
        assert_eq!(of_interface("lo").expect("loopback"), [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
        assert_eq!(
            of_interface("nothing0, lo").expect("the second"),
            [IpAddr::V4(Ipv4Addr::LOCALHOST)]
        );
        let error = of_interface("nothing0").expect_err("there is none");
        assert_eq!(
            error.message,
            "GLOO_SOCKET_IFNAME=\"nothing0\": there is no such interface with an address"
        );
    }
}
