"""Which addresses messages may go to."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.security.addresses import IpNetwork, refusal
from tests.tables import each_row


def networks(*names: str) -> tuple[IpNetwork, ...]:
    return tuple(ip_network(name) for name in names)


@each_row(
    ("address", "why"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("169.254.0.1", "link-local"),
        ("169.254.169.254", "cloud metadata"),
        ("100.64.0.1", "shared by a carrier's customers"),
        ("100.127.255.255", "shared by a carrier's customers"),
        ("100.100.100.200", "cloud metadata"),
        ("168.63.129.16", "cloud metadata"),
        ("192.0.0.192", "cloud metadata"),
        ("192.0.0.9", "reserved"),
        ("192.0.2.1", "for documentation"),
        ("198.51.100.1", "for documentation"),
        ("203.0.113.1", "for documentation"),
        ("198.18.0.1", "for benchmarking"),
        ("198.19.255.255", "for benchmarking"),
        ("192.88.99.1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.250", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("fe80::1", "link-local"),
        ("febf::1", "link-local"),
        ("fec0::1", "private"),
        ("fc00::1", "private"),
        ("fd12:3456::1", "private"),
        ("fd00:ec2::254", "cloud metadata"),
        ("fd20:ce::254", "cloud metadata"),
        ("ff02::1", "multicast"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "cloud metadata"),
        ("::127.0.0.1", "an IPv4 address inside IPv6"),
        ("::93.184.215.14", "an IPv4 address inside IPv6"),
        ("::ffff:0:127.0.0.1", "an IPv4 address inside IPv6"),
        ("2002:7f00:1::", "an IPv4 address inside IPv6"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "an IPv4 address inside IPv6"),
        ("64:ff9b::127.0.0.1", "loopback, inside IPv6"),
        ("64:ff9b::10.0.0.1", "private, inside IPv6"),
        ("64:ff9b::169.254.169.254", "cloud metadata, inside IPv6"),
        ("64:ff9b:1::1", "an IPv4 address inside IPv6"),
        ("2001:db8::1", "for documentation"),
        ("3fff::1", "for documentation"),
        ("2001:2::1", "for benchmarking"),
        ("2001:20::1", "reserved"),
        ("100::1", "not public"),
        ("4000::1", "not public"),
        ("5f00::1", "not public"),
        ("fe80::1%eth0", "an address with a zone"),
        ("2606:4700::1111%a.example", "an address with a zone"),
    ],
)
def test_what_is_not_public_is_refused_as_what_it_is(address: str, why: str) -> None:
    assert refusal(ip_address(address), ()) == why


@each_row(
    "address",
    [
        "8.8.8.8",
        "93.184.215.14",
        "1.1.1.1",
        "172.15.255.255",
        "172.32.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "11.0.0.1",
        "223.255.255.254",
        "2606:4700::1111",
        "2a00:1450:4001:81b::200e",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_what_is_public_is_not_refused(address: str) -> None:
    assert refusal(ip_address(address), ()) is None


@each_row(
    ("address", "allowed", "may"),
    [
        ("10.1.2.3", "10.1.0.0/16", True),
        ("10.2.0.1", "10.1.0.0/16", False),
        ("::ffff:10.1.2.3", "10.1.0.0/16", True),
        ("64:ff9b::10.1.2.3", "10.1.0.0/16", False),
        ("2002:a01:203::", "10.1.0.0/16", False),
        ("64:ff9b::10.1.2.3", "64:ff9b::/96", True),
        ("127.0.0.1", "127.0.0.0/8", True),
        ("::1", "127.0.0.0/8", False),
        ("::1", "::1/128", True),
        ("fd12::1", "fd12::/16", True),
        ("169.254.169.254", "169.254.169.254/32", True),
        ("::ffff:127.0.0.1", "::/0", False),
        ("10.0.0.1", "::/0", False),
        ("fe80::1%a.example", "fe80::/10", False),
    ],
)
def test_a_network_that_is_allowed_wins_and_allows_nothing_else(address: str, allowed: str, may: bool) -> None:
    assert (refusal(ip_address(address), networks(allowed)) is None) is may


@given(st.integers(0, 2**32 - 1))
def test_the_mapped_form_of_an_address_is_judged_as_the_address(number: int) -> None:
    address = IPv4Address(number)
    for allowed in ((), networks("10.0.0.0/8", "fd00::/8")):
        assert refusal(IPv6Address((0xFFFF << 32) + number), allowed) == refusal(address, allowed)


@given(st.integers(0, 2**32 - 1))
def test_nothing_is_let_through_that_python_does_not_call_public(number: int) -> None:
    address = IPv4Address(number)
    assert address.is_global or refusal(address, ()) is not None


@given(st.integers(0, 2**128 - 1))
def test_no_ipv6_address_is_let_through_that_python_does_not_call_public(number: int) -> None:
    address = IPv6Address(number)
    if address.ipv4_mapped is None and refusal(address, ()) is None:
        assert address.is_global
