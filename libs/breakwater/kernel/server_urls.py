"""URLs that name several servers of a cluster, as `nats://user:password@n1:4222,n2:4222,n3:4222`."""

from __future__ import annotations

from urllib.parse import urlsplit


def server_urls(url: str) -> list[str]:
    """Returns a URL for each server that a URL names: all of it is the same but the address.

    Raises:
        ValueError: an address is none. The text does not repeat the URL, as it may hold a password.
    """
    parts = urlsplit(url)
    credentials, at, addresses = parts.netloc.rpartition("@")
    urls = [parts._replace(netloc=f"{credentials}{at}{address}") for address in addresses.split(",")]
    try:
        has_hosts = all(parsed.hostname and (parsed.port is None or parsed.port) for parsed in urls)
    except ValueError:
        has_hosts = False
    if not has_hosts:
        raise ValueError("an address of the URL has no host, or a port that is no number")
    return [parsed.geturl() for parsed in urls]
