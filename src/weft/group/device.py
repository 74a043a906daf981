"""A group, for tensors on an accelerator: the same ranks, over a wire of that device.

Headers and sizes travel over the group's wire for the CPU. Payloads travel over a wire of the
device:

* `torch_rounds`: the caller's own process group, if its backend takes tensors of the device, as
  NCCL, XCCL and UCC do (gloo only those of the CPU).
* `staged`: copies in page-locked memory, sent over the wire for the CPU.

Where the device has streams the host does not wait: a wait has the current stream wait. So no wait
ends at a deadline; a `Watcher` looks whether what was waited for comes, and breaks the group if it
does not.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WeftError, WireError
from ..wire import interface
from ..wire.memory import Pool
from ..wire.staged import Staged
from ..wire.torch_rounds import backend_for, rounds_over
from .group import Group, Pending, Recv, Send
from .processes import Exchange, ProcessWire, UnderWay
from .subset import Part

_log = logging.getLogger("weft")

_PAUSES = (1e-4, 0.02)  # seconds between two looks at what is watched: the first, and the longest


def on_device(group: ProcessWire, device: torch.device) -> OnDevice:
    """The group for tensors of a device: over its process group, or else through the host.

    The log says once for a group and a device that tensors go through the host.
    """
    process_group = group.process_group()
    backend = None if process_group is None else backend_for(process_group, device)
    if process_group is not None and backend is not None:
        rounds = rounds_over(weakref.ref(process_group), group.rank, group.size, device)
        return OnDevice(group, rounds, backend)
    if process_group is not None:
        _log.warning(
            "rank %d: tensors on %s are copied through the host: the group's backends are %s",
            group.rank,
            device.type,
            dist.get_backend_config(process_group),
        )
    return OnDevice(group, Staged(group.wire, device), "staged through the host")


class OnDevice(Part):
    """Tensors of one device between the ranks of a group, over a wire of that device.

    Numbers of ranks, worker, traffic and verdicts are the group's.

    Attributes:
        wire: what carries the tensors.
    """

    def __init__(self, group: ProcessWire, wire: interface.Wire, name: str) -> None:
        """
        Args:
            group: which closes this.
            wire: of the same ranks; it is closed with this.
            name: of the wire, for people and for fingerprints: "nccl".
        """
        super().__init__(group, range(group.size), keeps=False)
        self.memory = Pool(device=wire.device)
        self.route = f"{wire.device.type} ({name})"
        self.wire = wire
        self.features = wire.features
        self.carrier = name
        self._group = weakref.ref(group)
        self._watcher: Watcher | None = None
        if wire.features.streams:
            self._watcher = Watcher(group, wire.device, f"a round over {name}")
        group.guard(wire)

    @property
    def group(self) -> ProcessWire:
        """The group whose ranks these are."""
        group = self._group()
        assert group is not None  # who uses this holds the group
        return group

    def among(self, ranks: Sequence[int]) -> Part:
        """The same, for a call in which these ranks alone take part; all keep their numbers."""
        if not self.features.lockstep or len(ranks) == self.size:
            return self
        return _Among(self, ranks)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        return self.post_over(self.wire, range(self.size), sends, recvs, channel)

    def post_over(
        self,
        wire: interface.Wire,
        ranks: Sequence[int],
        sends: Sequence[Send],
        recvs: Sequence[Recv],
        channel: int,
    ) -> Pending:
        """Post messages over a wire of some of these ranks.

        Args:
            wire: of some ranks.
            ranks: these, as the wire numbers them; sends and receives have the group's numbers.
            sends, recvs, channel: as for `post`.
        """
        self.check_peers(sends, recvs)
        number = {rank: index for index, rank in enumerate(ranks)}
        outgoing = [(number[peer], tensor) for peer, tensor in sends]
        incoming = [(number[peer], into) for peer, into in recvs]
        pending = self.group.use("posted messages", wire.post, outgoing, incoming, channel)
        self.traffic.count(sends)
        if self.features.lockstep:
            return self.in_round(pending, ranks)
        return Exchange(self.group, pending, sends, recvs)

    def in_round(self, pending: interface.Pending, ranks: Sequence[int]) -> Pending:
        """What a round brings, in which these ranks take part."""
        return _Round(self.group, pending, f"a round over {self.carrier}", ranks, self._watcher)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        wire = self.wire
        assert isinstance(wire, interface.Reducing)
        alias = tensor.detach()  # the caller may give its tensor other memory meanwhile
        pending = self.group.use("began a reduction", wire.all_reduce, alias, op)
        return self.in_round(pending, range(self.size))

    def lease(self, nbytes: int) -> interface.Lease:
        return self.memory.lease(nbytes)

    def diagnose(self, where: str) -> WireError | None:
        return self.group.diagnose(where)

    def fail_if(self, wrong: Tensor, accuse: Callable[[], WireError | None]) -> None:
        if self._watcher is None:
            super().fail_if(wrong, accuse)
            return
        # the host does not wait
        pinned = not wrong.is_cpu
        on_host = torch.empty(wrong.shape, dtype=wrong.dtype, device="cpu", pin_memory=pinned)
        on_host.copy_(wrong, non_blocking=True)
        self._watcher.watch(_Behind(wrong), lambda: accuse() if on_host else None)

    def small_all_gather(self, message: Tensor, cap: int) -> Pending:
        return self.group.small_all_gather(message, cap)

    def split(self, ranks: Sequence[int]) -> Part | None:
        raise WeftError(f"rank {self.rank}: a group on a device has no parts: make them beside it")

    def close(self) -> None:
        """Close the wire of the device; the group stays open."""
        if self._watcher is not None:
            self._watcher.end()
        self.wire.close()


class _Among(Part):
    """Some ranks of a group on a device, which have rounds of their own.

    Ranks have the numbers that they have in the group, and all that are not in these rounds are
    left alone.
    """

    def __init__(self, whole: OnDevice, ranks: Sequence[int]) -> None:
        super().__init__(whole, range(whole.size))
        assert isinstance(whole.wire, interface.Rounds)
        self.route = whole.route
        self.features = whole.features
        self._whole = whole
        self._wire = whole.wire.among(ranks)
        self._members = list(ranks)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        return self._whole.post_over(self._wire, self._members, sends, recvs, channel)

    def diagnose(self, where: str) -> WireError | None:
        return self._whole.diagnose(where)

    def fail_if(self, wrong: Tensor, accuse: Callable[[], WireError | None]) -> None:
        self._whole.fail_if(wrong, accuse)


class _Round(UnderWay):
    """What a round brings to this rank."""

    def __init__(
        self,
        group: ProcessWire,
        pending: interface.Pending,
        name: str,
        ranks: Sequence[int],
        watcher: Watcher | None,
    ) -> None:
        """
        Args:
            group: of the ranks.
            pending: of the wire.
            name: of the round, for errors.
            ranks: that take part.
            watcher: of what streams wait for; None: the host waits.
        """
        super().__init__(group, pending)
        self._name = name
        self._ranks = ranks
        self._watcher = watcher

    def receive(self) -> list[Tensor]:
        if self._watcher is not None:
            # before, since to begin a round may take until a peer has come
            self._watcher.watch(self.pending)
            return self.group.use(self.what(), self.pending.wait_stream)
        if len(self._ranks) == 1:
            return self.pending.wait()
        return super().receive()

    def awaited(self) -> list[int]:
        """All others: a round needs each of them, whatever it brings."""
        return [rank for rank in self._ranks if rank != self.group.rank]

    def peer(self) -> int:
        """The next of these ranks: from one to the next, waits lead to the one that does not."""
        position = list(self._ranks).index(self.group.rank)
        return self._ranks[(position + 1) % len(self._ranks)]

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        return f"was in {self._name}"


class Watched(Protocol):
    """Something that a device has yet to do."""

    def done(self) -> bool:
        """Whether it is through, or has failed. Any thread; never blocks."""


class Watcher:
    """Breaks a group if something does not come that the stream of a device waits for.

    Else nobody would: a kernel of NCCL that waits for a dead rank ends only at NCCL's own deadline,
    minutes later. Once the group is broken its wires are aborted, which ends the kernel.
    """

    def __init__(self, group: Group, device: torch.device, name: str) -> None:
        """`name`: of what is waited for, for errors."""
        self._queue: queue.SimpleQueue[tuple[Watched, Callable[[], object]] | None]
        self._queue = queue.SimpleQueue()
        self._given = weakref.ref(group), device, name
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.put, None).atexit = False

    def watch(self, pending: Watched, then: Callable[[], object] = lambda: None) -> None:
        """Watch something, behind what was given before; call `then` when it is through."""
        self._queue.put((pending, then))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch, args=[self._queue, *self._given], name="weft watcher", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """End the thread, once all is through."""
        self._queue.put(None)


def _watch(
    queued: queue.SimpleQueue[tuple[Watched, Callable[[], object]] | None],
    group: Callable[[], Group | None],
    device: torch.device,
    name: str,
) -> None:
    """The thread of a watcher."""
    torch.accelerator.set_device_index(device)  # else what it asks makes a context on device 0
    while (item := queued.get()) is not None:
        pending, then = item
        try:
            if _comes(pending, group, name):
                then()
        except Exception as error:  # what comes next is watched, too
            _log.error("%s could not be watched: %s", name, repr(error))
        del item, pending, then  # what they hold is not this idle thread's


def _comes(pending: Watched, group: Callable[[], Group | None], name: str) -> bool:
    """Wait until something is through; break the group at the deadline."""
    began = time.monotonic()
    pause, longest = _PAUSES
    while not pending.done():
        asked = group()
        if asked is None:
            return False  # nobody uses what comes
        if time.monotonic() - began > asked.timeout:
            if asked.diagnose(name) is None:
                asked.abort(f"{name} was not through after {asked.timeout:g} s")
            return False
        del asked
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


class _Behind:
    """What the current stream of a tensor's device does by now; it holds the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event = torch.Event(tensor.device)
        self._event.record(torch.accelerator.current_stream(tensor.device))

    def done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError as error:
            return "captur" not in str(error)  # a graph is recorded meanwhile: ask again
