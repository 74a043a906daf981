"""A door: a listener that proves who it is before anybody believes it.

Rank 0 opens one beside the store that it hosts. Whoever knocks sends a challenge, and the door
answers with what it has to tell and a keyed hash of both (HMAC-SHA256, RFC 2104): so only the
holder of the nonce can give the answer, not a program that came to listen on the port since, nor
one that sends back what it gets, and the nonce itself never travels.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .store import listener

__all__ = ["Door", "knock"]

_CHALLENGE = 32  # bytes
_PROOF = 32  # bytes
_HEAD = struct.Struct("!32sH")  # the proof, and how much follows
_PATIENCE = 2.0  # seconds for one conversation


class Door:
    """Answers those who knock, from a thread of its own, until it is closed.

    Attributes:
        port: where it listens.
        answers: how often somebody was answered.
    """

    def __init__(
        self, nonce: bytes, tell: Mapping[str, Any], *, address: str = "", port: int = 0
    ) -> None:
        """Open it.

        Args:
            nonce: what only those who are meant to come know.
            tell: what they are told, in JSON's terms.
            address: where to listen; empty: everywhere.
            port: the port; 0: a free one.

        Raises:
            OSError: the port is taken.
        """
        self.answers = 0
        self._nonce = nonce
        self._tell = json.dumps(dict(tell)).encode()
        self._listener = listener(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="weft-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Twice is fine."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        for sock in (self._wake, self._woken, self._listener):
            sock.close()

    def _serve(self) -> None:
        said: dict[socket.socket, tuple[bytes, float]] = {}
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(_PATIENCE)]
                if self._woken in ready:
                    break
                if self._listener in ready:
                    self._let_in(selector, said)
                for sock in list(said):
                    heard, since = said[sock]
                    if sock in ready:
                        chunk = _received(sock, _CHALLENGE - len(heard))
                        heard += chunk
                        said[sock] = heard, since
                        if chunk and len(heard) < _CHALLENGE:
                            continue
                        if len(heard) == _CHALLENGE:
                            self._answer(sock, heard)
                    elif time.monotonic() - since < _PATIENCE:
                        continue
                    selector.unregister(sock)
                    sock.close()
                    del said[sock]
            for sock in said:
                sock.close()

    def _let_in(
        self,
        selector: selectors.BaseSelector,
        said: dict[socket.socket, tuple[bytes, float]],
    ) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # whoever it was has gone
            return
        sock.setblocking(False)
        said[sock] = b"", time.monotonic()
        selector.register(sock, selectors.EVENT_READ)

    def _answer(self, sock: socket.socket, challenge: bytes) -> None:
        proof = _proof(self._nonce, challenge, self._tell)
        with contextlib.suppress(OSError):  # whoever it was has gone, and will come again
            sock.send(_HEAD.pack(proof, len(self._tell)) + self._tell)  # it fits into any buffer
            self.answers += 1


def knock(
    addresses: Sequence[str], ports: Sequence[int], nonce: bytes, timeout: float
) -> tuple[str, dict[str, Any]] | None:
    """The first of some addresses at which a door with this nonce answers, and what it tells.

    Args:
        addresses: hosts, by number or name, the best first.
        ports: on each of them.
        nonce: what the door must know.
        timeout: seconds for each conversation.

    Returns:
        None if none answers with the right proof.
    """
    for address in addresses:
        for port in ports:
            challenge = os.urandom(_CHALLENGE)
            try:
                with socket.create_connection((address, port), timeout) as sock:
                    sock.settimeout(timeout)
                    sock.sendall(challenge)
                    proof, length = _HEAD.unpack(_exactly(sock, _HEAD.size))
                    told = _exactly(sock, length)
            except OSError:
                continue
            if hmac.compare_digest(proof, _proof(nonce, challenge, told)):
                return address, json.loads(told)
    return None


def _proof(nonce: bytes, challenge: bytes, told: bytes) -> bytes:
    return hmac.digest(nonce, b"weft door" + challenge + told, "sha256")


def _received(sock: socket.socket, most: int) -> bytes:
    """What came in, nothing if the other end is gone."""
    try:
        return sock.recv(most)
    except OSError:
        return b""


def _exactly(sock: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        chunk = sock.recv(count - len(heard))
        if not chunk:
            raise ConnectionError("the other end closed before it had answered")
        heard += chunk
    return heard
