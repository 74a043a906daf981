"""A device's tensors over the group's wire for the CPU, through page-locked memory of the host.

It serves where no process group takes tensors of the device. A message is copied to the host when
it is posted, which waits for the work that makes it. It travels as every message of the CPU does,
and is copied to the device at the wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.memory import bytes_of
from .interface import Failure, Features, Pending, Recv, Send, Wire, WireFailed

_APART = 1 << 30  # exchanges channels that the CPU's own messages do not use for those they do
_LOOK = 0.05  # seconds between two looks at whether this wire was aborted


class Staged:
    """One rank's end; a `weft.wire.interface.Wire`.

    It fails with the wire of the CPU, which does not fail with it.
    """

    def __init__(self, cpu_wire: Wire, device: torch.device) -> None:
        self.rank = cpu_wire.rank
        self.size = cpu_wire.size
        self.device = device
        # without the figures that the wire of the CPU may state: here a message also waits for the
        # work that makes it, and is copied twice; the group measures what all of that takes
        self.features = Features(exact=cpu_wire.features.exact)
        self._cpu_wire = cpu_wire
        self._failure: Failure | None = None
        self._dropped: list[StagedPending] = []

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> StagedPending:
        self.check()
        copies = self._on_host([tensor for _, tensor in sends])
        peers = [peer for peer, _ in sends]
        rooms = [
            (peer, into if isinstance(into, int) else host_memory(into.nbytes, self.device))
            for peer, into in recvs
        ]
        posted = self._cpu_wire.post(list(zip(peers, copies, strict=True)), rooms, channel ^ _APART)
        return StagedPending(self, posted, [into for _, into in recvs])

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        self._failure = self._failure or failure

    def failure(self) -> Failure | None:
        return self._failure or self._cpu_wire.failure()

    def close(self) -> None:
        self.abort(Failure("aborted", None, f"rank {self.rank} has closed its wire"))
        self._dropped.clear()

    def keep(self, pending: StagedPending) -> None:
        """Keep a pending that nobody else keeps: what comes for it is yet to be copied."""
        if self.failure() is None:
            self._dropped.append(pending)

    def fill_dropped(self) -> None:
        """Copy what has come for pendings that nobody keeps."""
        for pending in [*self._dropped]:
            if self.failure() is None and pending.done():
                self._dropped.remove(pending)
                pending.fill(0)

    def check(self) -> None:
        """Raise WireFailed if the wire has failed."""
        failure = self.failure()
        if failure is not None:
            raise WireFailed(failure)

    def check_own(self) -> None:
        """Raise WireFailed if this wire was aborted or closed, whatever that of the CPU says."""
        if self._failure is not None:
            raise WireFailed(self._failure)

    def _on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the bytes of tensors, once these are there."""
        copies = []
        for tensor in tensors:
            copy = host_memory(tensor.nbytes, self.device)
            copies.append(copy.copy_(bytes_of(tensor), non_blocking=True))
        if copies and self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
        return copies


class StagedPending:
    """The messages of one post; a `weft.wire.interface.Pending`."""

    def __init__(self, wire: Staged, posted: Pending, intos: Sequence[Tensor | int]) -> None:
        """
        Args:
            wire: whose post it is.
            posted: the same messages on the wire of the CPU.
            intos: for each receive the tensor to fill, or the most bytes that may come.
        """
        self._wire = wire
        self._posted = posted
        self._intos = intos
        self._places = [None if isinstance(into, int) else bytes_of(into) for into in intos]
        self._received: list[Tensor] | None = None

    def __del__(self) -> None:
        if self._received is None and self._intos:
            self._wire.keep(self)

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        received = self.fill(timeout)
        self._wire.fill_dropped()
        return received

    def fill(self, timeout: float | None) -> list[Tensor]:
        """Wait, and copy what came to the device; once."""
        if self._received is None:
            self._received = self._on_device(self._arrived(timeout))
        return self._received

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        return self._posted.done() or self._wire.failure() is not None

    def waiting_for(self) -> list[int]:
        return self._posted.waiting_for()

    def release(self) -> None:
        self._received = []

    def _arrived(self, timeout: float | None) -> list[Tensor]:
        """What came, on the host. An abort of this wire ends it, too, though not the CPU's."""
        if self._wire.failure() is not None and self._posted.done():
            return self._posted.wait(0)  # it was complete before
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._wire.check()
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            try:
                arrived = self._posted.wait(max(0.0, left))
            except TimeoutError:
                if left < _LOOK:
                    raise
            else:
                self._wire.check_own()  # it may have been aborted before this came
                return arrived

    def _on_device(self, arrived: Sequence[Tensor]) -> list[Tensor]:
        """What came, copied to the tensors that are to be filled, or to new memory."""
        received = []
        for message, into, place in zip(arrived, self._intos, self._places, strict=True):
            if isinstance(into, int):
                received.append(message.to(self._wire.device, copy=True))
            else:
                assert place is not None
                place.copy_(message, non_blocking=True)
                received.append(into)
        self._posted.release()
        return received


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Memory of the host for copies from or to a device: page-locked where that means anything."""
    is_locked = device.type != "cpu"
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
