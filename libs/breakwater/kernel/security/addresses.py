"""Decides which addresses the plane may send messages to: public ones, and those that the operator allows.

Otherwise a person who may write a URL into a config, or a DNS server, could reach what only this machine can reach: its
own ports, the private network, and the metadata service that hands out the cloud account's credentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated

from pydantic import BeforeValidator

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

ANYWHERE: tuple[IpNetwork, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
"""The allowed networks for a host that the operator has named."""

# From IANA's special-purpose registries. `is_private` and `is_global` differ between patch versions of Python, so they
# are only consulted last. Where networks overlap, the narrower one comes first. AWS and Google share an address for
# cloud metadata; Alibaba, Oracle and Azure have their own: 168.63.129.16 is public, but only answers inside Azure.
_REFUSED: tuple[tuple[IpNetwork, str], ...] = tuple(
    (ip_network(network), why)
    for why, networks in {
        "cloud metadata": "169.254.169.254/32 100.100.100.200/32 192.0.0.192/32 168.63.129.16/32 "
        "fd00:ec2::254/128 fd20:ce::254/128",
        "unspecified": "0.0.0.0/8 ::/128",
        "loopback": "127.0.0.0/8 ::1/128",
        "link-local": "169.254.0.0/16 fe80::/10",
        "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fec0::/10 fc00::/7",
        "shared by a carrier's customers": "100.64.0.0/10",
        "for documentation": "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",
        "for benchmarking": "198.18.0.0/15 2001:2::/48",
        "multicast": "224.0.0.0/4 ff00::/8",
        "an IPv4 address inside IPv6": "64:ff9b:1::/48 2002::/16 2001::/32 ::/96 ::ffff:0:0:0/96",
        "reserved": "192.0.0.0/24 192.88.99.0/24 240.0.0.0/4 2001::/23",
    }.items()
    for network in networks.split()
)
_PUBLIC_6 = IPv6Network("2000::/3")
"""The public addresses of IPv6; all others are reserved."""
_NAT64 = IPv6Network("64:ff9b::/96")


def refusal(address: IpAddress, allowed: Sequence[IpNetwork]) -> str | None:
    """Returns the reason why nothing is sent to an address, such as `loopback` or `private`; None if it may be used.

    Args:
        address: the address to connect to.
        allowed: the operator's networks, which override any refusal. An IPv4 network also covers its mapped form
            (`::ffff:10.1.2.3`); an IPv6 network covers no IPv4 address.
    """
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            # The system resolves an address with a zone again, and a name such as `2606:4700::1%a.example` by DNS.
            return "an address with a zone"
        if address.ipv4_mapped is not None:
            return refusal(address.ipv4_mapped, allowed)
    if any(address in network for network in allowed):
        return None
    if address in _NAT64:
        # Networks without IPv4 reach IPv4 hosts this way: a gateway connects to the embedded address.
        inside = refusal(IPv4Address(int(address) & 0xFFFF_FFFF), ())
        return inside and f"{inside}, inside IPv6"
    public = address.is_global and (address.version == 4 or address in _PUBLIC_6)
    return next((why for network, why in _REFUSED if address in network), None if public else "not public")


def is_in(address: str, networks: Iterable[IpNetwork]) -> bool:
    """Returns True if an address, as a connection's peer has it, is in a network. Unix sockets are in none."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in networks)


def _network(setting: object) -> IPv4Network | IPv6Network:
    try:
        return ip_network(str(setting))
    except ValueError as error:
        raise ValueError(f"{error}; write a network like '10.1.0.0/16'") from error


# One error message of ours replaces pydantic's two, whose paths name internals of pydantic.
NetworkSetting = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]
