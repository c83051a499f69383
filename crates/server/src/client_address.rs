//! The address of a client: that of the connection, or the one that a trusted proxy reports.

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::FORWARDED;
use axum::http::request::Parts;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// The addresses whose first `prefix` bits are those of `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    base: IpAddr,
    prefix: u32,
}

/// The text is not `ADDRESS` or `ADDRESS/PREFIX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRangeError;

impl FromStr for AddressRange {
    type Err = AddressRangeError;

    fn from_str(text: &str) -> Result<Self, AddressRangeError> {
        let (base, prefix) = match text.split_once('/') {
            Some((base, prefix)) => (base, Some(prefix.parse::<u32>().map_err(|_| AddressRangeError)?)),
            None => (text, None),
        };
        let base: IpAddr = base.trim().parse().map_err(|_| AddressRangeError)?;
        let bits = if base.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(bits);
        if prefix > bits { Err(AddressRangeError) } else { Ok(Self { base, prefix }) }
    }
}

impl AddressRange {
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let is_same = |base: u128, other: u128, bits: u32| {
            let ignored = bits - self.prefix;
            ignored == 128 || base >> ignored == other >> ignored
        };
        match (self.base, address.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(other)) => {
                is_same(u128::from(u32::from(base)), u128::from(u32::from(other)), 32)
            }
            (IpAddr::V6(base), IpAddr::V6(other)) => is_same(base.into(), other.into(), 128),
            _ => false,
        }
    }
}

pub(crate) fn is_trusted(address: IpAddr, proxies: &[AddressRange]) -> bool {
    proxies.iter().any(|range| range.contains(address))
}

/// What limits count as one client: an IPv4 address, or an IPv6 network of 64 bits, of which one client has all addresses.
pub(crate) fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) if !v6.is_loopback() => {
            IpAddr::from((u128::from(v6) & !u128::from(u64::MAX)).to_be_bytes())
        }
        other => other,
    }
}

/// The network of the client that sent a request; none where its address is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClientNetwork(pub Option<IpAddr>);

impl<S: Send + Sync> FromRequestParts<S> for ClientNetwork {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().copied().unwrap_or_default())
    }
}

/// The address of the client. Only a trusted proxy is believed. A proxy sets one of the two headers and may pass the other
/// on as the client has sent it: where they disagree, the request counts as the proxy's own.
pub(crate) fn client_address(peer: IpAddr, headers: &HeaderMap, proxies: &[AddressRange]) -> IpAddr {
    if !is_trusted(peer, proxies) {
        return peer;
    }
    let forwarded_for = last_untrusted(&listed(headers, "x-forwarded-for"), parse_node, proxies);
    let forwarded = last_untrusted(&listed(headers, FORWARDED.as_str()), parse_forwarded, proxies);
    match (forwarded_for, forwarded) {
        (Some(one), Some(other)) if one != other => peer,
        (Some(address), _) | (None, Some(address)) => address,
        (None, None) => peer,
    }
}

/// The elements of a header that is a list, in order.
fn listed<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
    let values = headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("?"));
    values.flat_map(|value| value.split(',')).collect()
}

/// Each proxy appends the address that it was called from: the last one that is no trusted proxy is the client. What is
/// before it, the client may have invented.
fn last_untrusted(
    elements: &[&str],
    parse: fn(&str) -> Option<IpAddr>,
    proxies: &[AddressRange],
) -> Option<IpAddr> {
    let mut last = None;
    for element in elements.iter().rev() {
        last = Some(parse(element)?);
        if !last.is_some_and(|address| is_trusted(address, proxies)) {
            break;
        }
    }
    last
}

/// The address in `for=192.0.2.60;proto=http`.
fn parse_forwarded(element: &str) -> Option<IpAddr> {
    let mut pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    let (_, node) = pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
    parse_node(node)
}

/// The address in `192.0.2.60`, `192.0.2.60:4711`, `2001:db8::1` or `"[2001:db8::1]:4711"`.
fn parse_node(text: &str) -> Option<IpAddr> {
    let text = text.trim().trim_matches('"');
    let address = text.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()));
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    address.or_else(bracketed).map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn address_range_contains_its_prefix() {
        let range = |text: &str| text.parse::<AddressRange>();
        for (text, inside, outside) in [
            ("10.1.2.3", "10.1.2.3", "10.1.2.4"),
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("0.0.0.0/0", "8.8.8.8", "::1"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::1"),
            ("::/0", "::1", "1.2.3.4"),
            ("127.0.0.1", "::ffff:127.0.0.1", "127.0.0.2"),
        ] {
            let range = range(text).expect("a range");
            assert!(range.contains(ip(inside)) && !range.contains(ip(outside)), "{text}");
        }
        for invalid in ["", "localhost", "10.0.0.0/33", "::/129", "10.0.0.0/x", "10.0.0/8", "1.2.3.4/-1"] {
            assert_eq!(range(invalid), Err(AddressRangeError), "{invalid}");
        }
    }

    #[test]
    fn client_address_is_taken_from_trusted_proxies_only() {
        let proxies: Vec<AddressRange> =
            ["127.0.0.1", "10.0.0.0/8"].iter().map(|text| text.parse().expect("a range")).collect();
        let address = |peer: &str, headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.append(*name, value.parse().expect("a header"));
            }
            client_address(ip(peer), &map, &proxies).to_string()
        };
        let xff = "x-forwarded-for";
        assert_eq!(address("192.0.2.9", &[(xff, "1.1.1.1")]), "192.0.2.9", "not a trusted proxy");
        assert_eq!(address("127.0.0.1", &[]), "127.0.0.1");
        assert_eq!(address("127.0.0.1", &[(xff, "1.1.1.1")]), "1.1.1.1");
        assert_eq!(
            address("127.0.0.1", &[(xff, "6.6.6.6, 1.1.1.1, 10.1.1.1")]),
            "1.1.1.1",
            "6.6.6.6 is invented"
        );
        assert_eq!(address("127.0.0.1", &[(xff, "6.6.6.6"), (xff, "1.1.1.1")]), "1.1.1.1");
        assert_eq!(address("127.0.0.1", &[(xff, "10.2.2.2, 10.1.1.1")]), "10.2.2.2");
        assert_eq!(address("127.0.0.1", &[(xff, "unknown")]), "127.0.0.1");
        assert_eq!(address("127.0.0.1", &[(xff, "1.1.1.1:99")]), "1.1.1.1");
        for forwarded in
            ["for=1.1.1.1", "proto=https; For=\"1.1.1.1:80\" ;by=10.0.0.1", "for=6.6.6.6, for=1.1.1.1"]
        {
            assert_eq!(address("10.9.9.9", &[("forwarded", forwarded)]), "1.1.1.1", "{forwarded}");
        }
        assert_eq!(address("127.0.0.1", &[("forwarded", "for=\"[2001:db8::7]:80\"")]), "2001:db8::7");
        assert_eq!(address("127.0.0.1", &[("forwarded", "for=_hidden")]), "127.0.0.1");
        assert_eq!(address("127.0.0.1", &[("forwarded", "for=6.6.6.6"), (xff, "1.1.1.1")]), "127.0.0.1");
        assert_eq!(address("127.0.0.1", &[("forwarded", "for=1.1.1.1"), (xff, "1.1.1.1")]), "1.1.1.1");
    }

    #[test]
    fn client_network_joins_ipv6_addresses() {
        assert_eq!(client_network(ip("2001:db8:1:2:3:4:5:6")), ip("2001:db8:1:2::"));
        assert_eq!(client_network(ip("::ffff:192.0.2.1")), ip("192.0.2.1"));
        assert_eq!(client_network(ip("::1")), ip("::1"));
    }
}
