"""Small messages that go again and again between the same ranks, and say what they said before.

As MPI's persistent requests: what each exchange needs anew is made once. And what is heard is only
compared, by the wire if it can, so where nothing is news an exchange costs next to nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WeftError
from ..kernels.cpu_talk import Came, Program
from .base import Pending, Wire

__all__ = ["NUMBER", "Rooms", "Routine", "Script", "told"]

NUMBER = 8
"""Bytes that every message begins with: the number of the call."""

_SIZE = 8  # bytes that a wire may want in front of a message
_ROOM = 16  # = in front of what is heard, so that it is aligned


class Rooms:
    """Memory for what peers say, made once for each."""

    def __init__(self, cap: int) -> None:
        """Room for messages of so many bytes, with their numbers."""
        self._cap = cap
        self._rooms: dict[int, Tensor] = {}

    def of(self, peer: int) -> Tensor:
        """The room for one peer; what it says is put `_ROOM` bytes behind its beginning."""
        if peer not in self._rooms:
            self._rooms[peer] = torch.empty(_ROOM + self._cap, dtype=torch.uint8)
        return self._rooms[peer]


@dataclass(frozen=True, slots=True)
class Script:
    """What is said in a routine.

    Attributes:
        says: what to say to each peer that is told something.
        expects: what each peer that says something is expected to begin with, behind the number.
        lengths: bytes that each of these is expected to say in all, without the number.
        rooms: memory for what is heard, which routines may share.
        common: whether what is said is always the same to all.
        soon: whether all say it at about the same time. Where arithmetic comes first, whoever is
            done sleeps until it is woken, so that those who are not have its core.
    """

    says: Mapping[int, bytes]
    expects: Mapping[int, bytes]
    lengths: Mapping[int, int]
    rooms: Rooms
    common: bool = False
    soon: bool = True


class Routine:
    """An exchange of one message at the most with each of some peers.

    Attributes:
        said: what is said to each peer, behind the number; the caller writes there what is new.
        heard: what each peer said, the number included: uint8, as long as any message may be.
    """

    said: dict[int, memoryview]
    heard: dict[int, Tensor]

    def __init__(self, wire: Wire, script: Script) -> None:
        """Prepare, over the wire of the whole group; nothing is sent."""
        says, expects = script.says, script.expects
        self._wire, self._expects, self._lengths = weakref.ref(wire), expects, script.lengths
        self._soon = script.soon
        frames: dict[int, bytearray] = {}
        for peer, message in says.items():
            shared = next(iter(frames.values())) if script.common and frames else None
            head = (NUMBER + len(message)).to_bytes(_SIZE, "big") + bytes(NUMBER)
            frames[peer] = bytearray(head + message) if shared is None else shared
        self._frames = frames
        self.said = {peer: memoryview(frame)[_ROOM:] for peer, frame in frames.items()}
        self._sends = [
            (peer, torch.frombuffer(frame, dtype=torch.uint8)[_SIZE:])
            for peer, frame in frames.items()
        ]
        self._rooms = {peer: script.rooms.of(peer) for peer in expects}
        self.heard = {peer: room[_ROOM:] for peer, room in self._rooms.items()}
        self._recvs = list(self.heard.items())
        self._seen = [
            (heard[: NUMBER + len(expects[peer])].numpy().data, expects[peer])
            for peer, heard in self._recvs
        ]
        self._sizes = [(peer, message.nbytes) for peer, message in self._sends]
        self._number = 0
        self._pending: Pending | None = None

    @property
    def wire(self) -> Wire:
        """The wire it goes over, which may keep it, and so is not kept by it."""
        wire = self._wire()
        if wire is None:
            raise WeftError("the wire of this exchange is gone: keep it while it is used")
        return wire

    def _places(self) -> dict[int, memoryview]:
        """Where the frame that is expected from each peer begins and ends."""
        return {
            peer: room[_ROOM - _SIZE :][: _SIZE + NUMBER + self._lengths[peer]].numpy().data
            for peer, room in self._rooms.items()
        }

    def _models(self) -> dict[int, bytes]:
        """What that frame begins with, but for its number."""
        return {
            peer: (NUMBER + self._lengths[peer]).to_bytes(_SIZE, "big") + bytes(NUMBER) + expected
            for peer, expected in self._expects.items()
        }

    def start(self, number: int) -> None:
        """Say what there is to say, in the call of this number; returns at once.

        Raises:
            WireError: the wire is broken or closed.
        """
        self._number, text = number, number.to_bytes(NUMBER, "little")
        for frame in self._frames.values():
            frame[_SIZE:_ROOM] = text
        self._pending = self.wire.post_small(self._sends, self._recvs)

    def finish(self) -> bool:
        """Hear all peers; whether all of them said what was expected.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        return self._as_expected(self._number)

    def follow(self, program: Program) -> None:
        """Bring boxes to and from their places in every `run`."""

    def run(
        self,
        number: int,
        at: tuple[int, int, int] = (0, 0, 0),
        meanwhile: Callable[[], object] | None = None,
    ) -> Came | None:
        """`start` and `finish`, and the steps of the program, by machine code.

        Args:
            number: of the call.
            at: addresses of the tensors x, y and z that steps are about.
            meanwhile: what to do between the two.

        Returns:
            What came of it. None: nothing was done, since there is no machine code for this wire,
            or not yet; from the first call on in which there is, it is never None.

        Raises:
            WireError: as both.
        """
        return None

    def _as_expected(self, number: int) -> bool:
        text = number.to_bytes(NUMBER, "little")
        # not the views themselves, which are compared item by item
        return all(seen.tobytes() == text + expected for seen, expected in self._seen)


def told(wire: Wire, name: str, said: Mapping[int, bytes], size: int) -> dict[int, bytes]:
    """Tell each peer something, and hear as much of it.

    Args:
        wire: among whom.
        name: of this exchange, for which the wire keeps a routine: making one takes longer than
            using it.
        said: to each peer.
        size: bytes of each of these; always the same for that name.

    Raises:
        WireError: the deadline passed, or a peer or a link failed.
    """
    kept: tuple[Routine, dict[int, memoryview]] | None = wire.kept.get(name)
    if kept is None:
        peers, blank = wire.peers, bytes(size)
        none, same = dict.fromkeys(peers, b""), dict.fromkeys(peers, size)
        script = Script(dict.fromkeys(peers, blank), none, same, Rooms(NUMBER + size), soon=False)
        made = wire.routine(script)
        texts = {peer: heard.numpy().data[NUMBER:] for peer, heard in made.heard.items()}
        wire.kept[name] = kept = made, texts
    routine, texts = kept
    for peer, message in said.items():
        routine.said[peer][:] = message
    if routine.run(0) is None:
        routine.start(0)
        routine.finish()
    return {peer: text.tobytes() for peer, text in texts.items()}
