"""The wire of tensors on an accelerator.

It stands beside the CPU wire of the same ranks, which carries headers and sizes, and finds failed
ranks. Posts are collected until one of them is waited for; then one *exchange* carries all of them:
a collective in which each rank sends bytes to each other one. So ranks cannot wait for each other
in a circle, as they can with NCCL's sends and receives. All ranks must have posted the same
messages since the last exchange: a schedule posts both ends of a message before any rank waits, and
a receive is exactly as long as its message.

If only some ranks take part in a call, the others know nothing of it. Then each pair of ranks sends
and receives instead of a collective.

There are two ways for an exchange; the device and the group's backends decide:

* `OverGroup`: `all_to_all_single` of the caller's own process group, if its backend takes tensors
  of the device, as NCCL, XCCL and UCC do (gloo only those of the CPU). The host does not wait: the
  exchange is queued in the current stream.
* `Staged`: copies in page-locked memory, sent over the CPU wire. The log says so once.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import serves
from ..errors import WeftError, WireError
from .base import Group, Pending, Recv, Send, as_bytes, flattened
from .memory import Pool
from .part import Part

_log = logging.getLogger("weft")

_GRAIN = 16  # bytes: messages begin at a multiple, enough for any dtype
_CHANNEL = 9  # of staged copies only
_HOST_ONLY = ("gloo", "weft", "mpi", "fake", "undefined")  # backends that take CPU tensors only
_PAUSES = 1e-4, 0.02  # seconds between two looks at an exchange: the first, and the longest


class Way(ABC):
    """How bytes on a device get to the other ranks.

    Attributes:
        name: for people: "nccl", "staged through the host".
    """

    name: str

    @abstractmethod
    def exchange(self, out: Tensor, data: Tensor, came: list[int], goes: list[int]) -> None:
        """Send parts of `data` to the ranks, `goes` bytes each, and fill `out` with theirs.

        Raises:
            RuntimeError: the group failed.
            WireError: the wire did.
        """

    def all_reduce(self, over: Group, tensor: Tensor) -> None:
        """Sum a tensor over all ranks of a wire, in place. Raises as `exchange`."""
        over.dense_all_reduce(tensor, "sum").wait()

    def among_some(self) -> Way:
        """The way for calls of some ranks: each pair of ranks exchanges by itself."""
        return self

    def abort(self) -> None:
        """End what is under way."""
        return None


class OverGroup(Way):
    """Over a process group whose backend takes tensors of the device."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.name, self._group = backend, weakref.ref(group)

    def exchange(self, out: Tensor, data: Tensor, came: list[int], goes: list[int]) -> None:
        dist.all_to_all_single(out, data, came, goes, group=self._group())

    def all_reduce(self, over: Group, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group())

    def among_some(self) -> Way:
        group = self._group()
        assert group is not None
        return BetweenPairs(group, self.name)

    def abort(self) -> None:
        if (group := self._group()) is not None:
            group.abort()


class BetweenPairs(OverGroup):
    """Over a process group, for calls of some of its ranks: by sends and receives.

    If the group was made with `init_process_group(device_id=...)`, NCCL has a communicator for it,
    and carries all messages at once. Else torch makes a communicator for each pair of ranks, and
    the two wait for each other there. So each rank serves lower peers first, and of a pair the
    lower rank sends first.
    """

    def exchange(self, out: Tensor, data: Tensor, came: list[int], goes: list[int]) -> None:
        group = self._group()
        assert group is not None
        messages: list[tuple[bool, Tensor, int]] = []  # whether it is sent, it, and the peer
        parts = zip(torch.split(data, goes), torch.split(out, came), strict=True)
        for peer, (part, place) in enumerate(parts):
            both = (True, part, peer), (False, place, peer)
            both = both if group.rank() < peer else both[::-1]
            messages += [message for message in both if message[1].numel()]
        if group.bound_device_id is None:
            works = [
                (group.send if sends else group.recv)([tensor], peer, 0)
                for sends, tensor, peer in messages
            ]
        else:
            operations = [
                dist.P2POp(
                    dist.isend if sends else dist.irecv, tensor, group=group, group_peer=peer
                )
                for sends, tensor, peer in messages
            ]
            works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()


class Staged(Way):
    """Through memory of the host, over the CPU wire."""

    name = "staged through the host"

    def __init__(self, beside: Group) -> None:
        self._beside = beside

    def exchange(self, out: Tensor, data: Tensor, came: list[int], goes: list[int]) -> None:
        sent, room = _locked(data).copy_(data), _locked(out)
        parts, places = torch.split(sent, goes), torch.split(room, came)
        others = self._beside.peers
        self._beside._post(  # counted already
            [(peer, parts[peer]) for peer in others if goes[peer]],
            [(peer, places[peer]) for peer in others if came[peer]],
            _CHANNEL,
        ).wait()
        out.copy_(room)


def _locked(like: Tensor) -> Tensor:
    """Page-locked memory of the host, of the shape and dtype of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=not like.is_cpu)


def way_for(wire: Group, device: torch.device) -> Way:
    """How tensors of a device travel between the ranks of a CPU wire."""
    group = wire.process_group()
    if group is not None:
        config = dist.get_backend_config(group)
        pairs = (pair.partition(":") for pair in config.split(","))
        backends = {kind: name for kind, _, name in pairs}
        backend = backends.get(device.type, "undefined")
        takes = backend not in _HOST_ONLY or (backend == "gloo" and device.type == "cpu")
        # if one of several backends is written in Python, torch keeps only that one: ask the group
        if takes and (len(set(backends.values())) == 1 or serves(group, device)):
            return OverGroup(group, backend)
        _log.warning(
            "rank %d: tensors on %s are copied through the host: the group's backends are %s",
            wire.rank,
            device.type,
            config,
        )
    return Staged(wire)


class DeviceWire(Part):
    """Tensors of one device between all ranks of a wire, which is beside it.

    Attributes:
        way: how they travel.
    """

    def __init__(self, beside: Group, device: torch.device, way: Way | None = None) -> None:
        super().__init__(beside, range(beside.size))
        self._beside, self._device = weakref.ref(beside), device
        self.name, self.memory = beside.name, Pool(device=device)
        self.way = way or way_for(beside, device)
        self.route = f"{device.type} ({self.way.name})"
        self._queued: list[_Post] = []
        self._some: DeviceWire | None = None
        # an exchange of CPU tensors (in tests) waits itself
        self._watcher = None if device.type == "cpu" else _Watcher(beside, self.way)

    post = Group.post  # which counts

    def diagnose(self, where: str) -> WireError | None:
        return self.beside.diagnose(where)

    def fail_if(self, wrong: Tensor, accuse: Callable[[], WireError | None]) -> None:
        if self._watcher is None:
            super().fail_if(wrong, accuse)
        else:  # the host does not wait
            told = _locked(wrong).copy_(wrong, non_blocking=True)
            self._watcher.watch(wrong, then=lambda: accuse() if told else None)

    def _among_some(self) -> DeviceWire:
        if self._some is None:
            self._some = DeviceWire(self.beside, self._device, self.way.among_some())
            self._some._watcher = self._watcher
        return self._some

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        post = _Post(self, sends, recvs, channel)
        if self.size > 1:
            self._queued.append(post)
        return post

    def small_all_gather(self, message: Tensor, cap: int) -> Pending:
        return self.beside.small_all_gather(message, cap)

    def split(self, ranks: Sequence[int]) -> Part | None:
        raise WeftError(f"rank {self.rank}: a wire of a device has no parts: make them beside it")

    def close(self) -> None:
        """End the watcher; the CPU wire stays open."""
        if self._watcher is not None:
            self._watcher.end()

    def _exchange(self) -> None:
        """Exchange all messages that were posted since the last exchange."""
        posts, self._queued = sorted(self._queued, key=lambda post: post.channel), []
        sends: list[list[Tensor]] = [[] for _ in range(self.size)]
        recvs: list[list[tuple[_Post, int, int]]] = [[] for _ in range(self.size)]
        for post in posts:
            for peer, tensor in post.sends:
                sends[peer].append(as_bytes(tensor))
            for number, (peer, place) in enumerate(post.recvs):
                size = place if isinstance(place, int) else place.nbytes
                recvs[peer].append((post, number, size))
        goes = [sum(_filled(part.numel()) for part in parts) for parts in sends]
        came = [sum(_filled(size) for _, _, size in parts) for parts in recvs]
        data, out = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            for sizes in (goes, came)
        )
        at = 0
        for part in (part for parts in sends for part in parts):
            data[at : at + part.numel()] = part
            at += _filled(part.numel())
        self._begin(lambda: self.way.exchange(out, data, came, goes), data, out)
        at = 0
        for post, number, size in (each for parts in recvs for each in parts):
            post.take(number, out[at : at + size])
            at += _filled(size)

    def _sum(self, tensor: Tensor) -> None:
        alias = tensor.detach()  # the caller may give its tensor other memory meanwhile
        self._begin(lambda: self.way.all_reduce(self, alias), alias)

    def _begin(self, exchange: Callable[[], None], *kept: Tensor) -> None:
        """Begin an exchange; `kept` is its memory, which is held until it is complete.

        Raises:
            WireError: it failed, and the CPU wire found that a peer is to blame.
        """
        try:
            exchange()
        except RuntimeError as error:
            raise self.beside.diagnose(f"an exchange over {self.way.name}") or error from error
        if self._watcher is not None:
            self._watcher.watch(*kept)


class _Post(Pending):
    """Sends and receives that go with the next exchange."""

    def __init__(
        self, wire: DeviceWire, sends: Sequence[Send], recvs: Sequence[Recv], channel: int
    ) -> None:
        self._wire, self._came = wire, [torch.empty(0)] * len(recvs)
        # the caller may give its tensors other memory meanwhile
        self.sends = [(peer, tensor.detach()) for peer, tensor in sends]
        self.recvs, self.channel = recvs, channel

    def wait(self) -> list[Tensor]:
        if self in self._wire._queued:
            self._wire._exchange()
        return self._came

    def take(self, number: int, came: Tensor) -> None:
        """Set the bytes that came for a receive, by its number."""
        place = self.recvs[number][1]
        if isinstance(place, Tensor):
            if place.numel():
                flattened(place).view(torch.uint8).copy_(came)
            came = place
        self._came[number] = came

    def release(self) -> None:
        self._came = []


class _Watcher:
    """Ends exchanges that wait for a dead rank.

    A kernel of NCCL that waits for a dead rank ends only at NCCL's own deadline, minutes later. So
    a thread polls each exchange until it is complete, and aborts the group if the CPU wire breaks,
    or at the deadline. It holds the memory of an exchange that long.
    """

    def __init__(self, beside: Group, way: Way) -> None:
        self._beside, self._way = weakref.ref(beside), way
        self._queue: SimpleQueue[tuple[torch.Event, Any, tuple[Tensor, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, *kept: Tensor, then: Callable[[], object] = lambda: None) -> None:
        """Watch the exchange queued last in the current stream; call `then` when it is complete."""
        event = torch.Event(kept[0].device)
        event.record()
        self._queue.put((event, then, kept))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft exchanges", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._is_through(item[0]):
                item[1]()
            else:
                self._way.abort()
            del item  # the memory is not this idle thread's

    def _is_through(self, event: torch.Event) -> bool:
        """Wait for an exchange; False if it must be aborted."""
        began, pause = time.monotonic(), _PAUSES[0]
        while not event.query():
            beside = self._beside()
            if beside is None:
                return True  # the wire is gone, so nobody uses what comes
            try:
                beside.post()  # which raises what broke it
            except WireError:
                return False
            if time.monotonic() - began > beside.timeout:
                what = f"an exchange over {self._way.name}"
                if beside.diagnose(what) is None:
                    beside.abort(f"{what} was not through after {beside.timeout:g} s")
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        return True


def _filled(nbytes: int) -> int:
    """Bytes of a message, rounded up to where the next may begin."""
    return -(-nbytes // _GRAIN) * _GRAIN
