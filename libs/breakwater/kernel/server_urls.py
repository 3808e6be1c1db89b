"""URLs that name several servers of a cluster, as `nats://user:password@n1:4222,n2:4222,n3:4222`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def server_urls(url: str) -> list[str]:
    """Returns a URL for each server that a URL names: all of it is the same but the address.

    Raises:
        ValueError: an address is none. The text does not repeat the URL, as it may hold a password.
    """
    # Each by itself: a recent `urlsplit` takes no text before the bracket of an IPv6 address, and a list has some.
    scheme, _, location = url.partition("://")
    netloc = re.split(r"[/?#]", location, maxsplit=1)[0]
    credentials, at, addresses = netloc.rpartition("@")
    path = location[len(netloc) :]
    message = "an address of the URL has no host, or a port that is no number"
    try:
        urls = [urlsplit(f"{scheme}://{credentials}{at}{address}{path}") for address in addresses.split(",")]
        has_hosts = all(parsed.hostname and (parsed.port is None or parsed.port) for parsed in urls)
    except ValueError:  # whose text may repeat the URL
        raise ValueError(message) from None
    if not has_hosts:
        raise ValueError(message)
    return [parsed.geturl() for parsed in urls]
