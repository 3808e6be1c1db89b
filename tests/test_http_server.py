"""The socket that services listen on."""

from __future__ import annotations

import socket

from breakwater.embedded.ports import free_port
from breakwater.http_server import listen


def test_a_connection_sends_what_is_written_at_once() -> None:
    port = free_port()
    with listen("127.0.0.1", port) as listening, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
