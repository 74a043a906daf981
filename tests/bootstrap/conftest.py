"""What the tests of start-up share."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number: int = sock.getsockname()[1]
    return number
