"""The group: who takes part, and what they send to each other, in few verbs.

Programs and algorithms hold a group, which knows nothing of rows. An algorithm is written against
this face alone, so it runs unchanged between processes (`process_group`), between threads
(`threads`), and in a simulation.

The rules, for every group:

* Posts between the same two ranks on the same channel match in the order they were made; different
  pairs of ranks, and different channels, are independent. A send may complete only when it is
  received.
* A receive is a tensor, which its message fills exactly, or the most bytes that may come, of which
  as many are returned as came.
* Nobody sends to itself.
* Every wait ends: with what was awaited, or within `timeout` seconds with a `WireError` that says
  which rank waited for what, from which peer, for how long, and which rank is to blame. After
  that the group is broken: every later use raises the same verdict at once.
* One thread at a time uses a group. `group.worker` gives calls their turn.
"""

from __future__ import annotations

import abc
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import is_of_group, keep
from ..devices import Streams, on_host
from ..errors import Error, WeftError, WireError, entry
from ..wire.interface import Features, Lease
from ..wire.memory import Pool
from .traffic import Traffic
from .worker import Worker

T = TypeVar("T")

SMALL = 1 << 18
"""The channel of small messages about a call: statements, lengths, heads of index lists."""

Send = tuple[int, Tensor]
"""(peer, contiguous CPU tensor of any dtype); it must not change until the post is waited for."""

Recv = tuple[int, Tensor | int]
"""(peer, contiguous CPU tensor to fill) or (peer, maximum bytes)."""


class Pending(abc.ABC):
    """Some sends and receives under way."""

    @abc.abstractmethod
    def wait(self) -> list[Tensor]:
        """Wait until all of them are done; return what was received, in the order asked for.

        Where the receive was a tensor, that tensor; where it was a maximum, a uint8 view of the
        bytes that came, to be read only, and until `release()`. Waiting again returns the same.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """

    def release(self) -> None:
        """Give back the leased views, if there are any: after `wait()`. Twice does nothing."""
        return None

    def awaited(self) -> list[int] | None:
        """The ranks whose messages are not complete; any thread may ask, and no message moves.

        Only for texts that name missing ranks. None: it is unknown.
        """
        return None

    def is_through(self) -> bool:
        """Whether `wait` would return at once; no message moves. False: it is unknown.

        Only for the thread that waits, which may do something else first.
        """
        return False


class Group(abc.ABC):
    """Some ranks that talk to each other; what `weft.init` returns, and `group=` takes.

    Attributes:
        rank: this rank's number in the group.
        size: how many ranks there are.
        timeout: seconds that any one wait may last.
        host: an opaque name of the machine this rank runs on; ranks with equal names share its
            cores.
        memory: the pool that workspaces are leased from.
        traffic: what was sent so far.
        name: the same on all its ranks; "" if nobody gave it one.
        global_ranks: its ranks, by their numbers in the job.
        route: tensors of which device it carries, and how: "cpu", "cuda (nccl)"; for fingerprints.
        process_group: returns the process group of torch's that it stands for, or None.
        features: of what carries its tensors.
        streams: in which it computes on accelerators.
        devices: the same ranks, for tensors of those devices that it was used for.
        payloads: the same ranks, for tensors of the CPU, where a wire of their own carries them and
            this one carries openings and lengths; or None.
    """

    rank: int
    size: int
    timeout: float
    host: str

    def __init__(self, rank: int, size: int, timeout: float, host: str) -> None:
        self.rank, self.size, self.timeout, self.host = rank, size, timeout, host
        self.memory = Pool()
        self.traffic = Traffic(rank)
        self._worker: Worker | None = None
        self.name = ""
        self.global_ranks = tuple(range(size))
        self._end: Callable[[], None] | None = None  # of a `with` block, if it is not `close`
        self.process_group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.route = "cpu"
        self.features = Features()
        self.streams = Streams()
        self.devices: dict[torch.device, Group] = {}
        self.payloads: Group | None = None
        _made.add(self)

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse `copy` and `pickle`: two groups over the same connections would mix up messages"""
        raise WeftError(
            f"rank {self.rank}: a group cannot be copied or pickled, since its connections are "
            "this process's: pass the group itself, or make one where it is needed (weft.init)"
        )

    @property
    def peers(self) -> list[int]:
        """All other ranks, starting with the next one, so that not all turn to rank 0 at once."""
        return [*range(self.rank + 1, self.size), *range(self.rank)]

    def rank_in_errors(self, rank: int) -> int:
        """The number that errors call a rank by; a part uses that of the group it is a part of."""
        return rank

    @abc.abstractmethod
    def fail(self, peer: int, text: str) -> WireError:
        """Break the group for all ranks on account of what a peer did; the error to raise here."""

    def fail_if(self, wrong: Tensor, accuse: Callable[[], WireError | None]) -> None:
        """Raise if a peer sent wrong data; on an accelerator, where nobody waits, a later call may.

        Args:
            wrong: one bool, on the device of the tensors.
            accuse: makes the error, by `fail`.
        """
        if wrong and (error := accuse()):
            raise error

    def decode(self, peer: int, what: str, decode: Callable[..., T], *given: Any) -> T:
        """`decode(*given)`, which reads bytes that a peer sent.

        Args:
            peer: the rank that sent them.
            what: the bytes should be, for the error.
            decode: raises any Exception if the bytes are invalid. It has no side effects, and
                allocates no more memory than valid bytes need.
            given: the bytes, and what else `decode` takes.

        Raises:
            WireError: `decode` raised. The group is broken for all ranks, since messages and calls
                may no longer match.
        """
        try:
            return decode(*given)
        except Error:
            raise
        except Exception as error:
            sender = f"rank {self.rank_in_errors(peer)}"
            why = f"{sender} sent {what} that cannot be read: {error!r:.500}"
            raise self.fail(peer, why) from error

    def diagnose(self, where: str) -> WireError | None:
        """The error to raise after a call of another library failed, if a peer is to blame.

        Args:
            where: the call, as the end of the clause "while rank 0 was in ...".
        """
        return None

    @entry
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave. If a process group raised, raise an error that names the culprit instead."""
        lost = self.diagnose("a call of torch.distributed's") if is_of_group(error) else None
        (self._end or self.close)()
        if lost is not None:
            raise lost from error

    @abc.abstractmethod
    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        """Start sending and receiving, in the order given; returns at once.

        Receives are posted before sends. Empty tensors are sent and received like others. Posts
        on different channels (small numbers) match independently of each other.

        Raises:
            WireError: the group is broken or closed.
            WeftError: a rank is no peer.
        """

    def check_peers(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> None:
        """Raise WeftError if a message is for or from a rank that is no peer."""
        for peer, _ in (*sends, *recvs):
            if peer == self.rank or not 0 <= peer < self.size:
                raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")

    def subset(self, ranks: Sequence[int]) -> Group:
        """Some of the ranks, this one among them, as a group: nothing is set up, nothing is sent.

        The ranks are numbered in the order given. Messages go over this group, which counts them,
        and a failure of the subset is a failure of this group. Errors name ranks by their numbers
        here.

        Raises:
            WeftError: these are not distinct ranks of this group, or this rank is not among them.
        """
        from .subset import Part  # here, since it is written with what stands here

        return Part(self, ranks)

    @abc.abstractmethod
    def split(self, ranks: Sequence[int]) -> Group | None:
        """Some of the ranks, as a group with connections of its own; numbered in the order given.

        Every rank of this group calls it with the same list; those outside get None.

        Raises:
            WeftError: these are not distinct ranks of this group.
            WireError: somebody did not come in time.
        """

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Break the group, telling every peer that this rank did it and why; waits for no peer.

        For a rank that cannot finish a schedule that others are in (out of memory, interrupted).
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave: tell the peers that this is no death, and let go of everything. Twice is fine."""
        if self._worker is not None:
            self._worker.stop()
        while self.devices:
            self.devices.popitem()[1].close()
        if self.payloads is not None:
            self.payloads.close()
        self.memory.drain()

    def small_all_gather(self, message: Tensor, cap: int) -> Pending:
        """Start sending a small message (uint8, 1-D, at most `cap` bytes) from each to all.

        `wait()` returns one uint8 tensor for each rank, in rank order: the bytes that it sent.
        """
        recvs = [(peer, cap) for peer in range(self.size) if peer != self.rank]
        pending = self.post([(peer, message) for peer in self.peers], recvs, SMALL)
        return _WithOwn(pending, self.rank, message)

    def all_gather_bytes(
        self, message: bytes, decode: Callable[[bytes], T], what: str = "a message"
    ) -> list[T]:
        """Exchange messages of one length between all ranks; the decoded messages, in rank order.

        Args:
            message: this rank's; all have the same length.
            decode, what: as for `decode`.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        pending = self.small_all_gather(own, len(message))
        heard = [each.numpy().tobytes() for each in pending.wait()]
        pending.release()
        return [self.decode(rank, what, decode, each) for rank, each in enumerate(heard)]

    def end_with(self, leave: Callable[[], None] | None) -> None:
        """Set what is called at the end of a `with` block of the group; None: `close`."""
        self._end = leave

    @abc.abstractmethod
    def lease(self, nbytes: int) -> Lease:
        """Workspace that is best to send from: peers of this host read it where it lies."""

    @property
    def worker(self) -> Worker:
        """The one queue in which calls on this group take their turn."""
        if self._worker is None:
            self._worker = Worker(self)
        return self._worker

    def _call(self) -> tuple[int, str]:
        """How many calls were started, and the name of the one that runs, or ""."""
        return (0, "") if self._worker is None else (self._worker.calls, self._worker.doing)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start reducing over all ranks, in place, where `features.reduces` has it.

        What carries the tensors does it, in whatever order is fastest there.
        """
        raise WeftError(f"rank {self.rank}: {self.route} reduces nothing by itself")

    def for_payloads(self) -> Group:
        """The same ranks, for tensors on the host."""
        return self.payloads or self

    def for_device(self, device: torch.device) -> Group:
        """The same ranks, for tensors of an accelerator."""
        if device not in self.devices:
            self.devices[device] = self.make_for_device(device)
        return self.devices[device]

    @abc.abstractmethod
    def make_for_device(self, device: torch.device) -> Group:
        """Make what `for_device` keeps."""

    def among(self, ranks: Sequence[int]) -> Group:
        """This group, for a call in which these ranks alone take part; all keep their numbers."""
        return self

    def _after_fork(self) -> None:
        """In a forked child, where the group cannot be used, and has no threads."""
        keep(self)
        if self._worker is not None:
            self._worker.after_fork()


_made: weakref.WeakSet[Group] = weakref.WeakSet()


def _after_fork() -> None:
    for group in list(_made):
        group._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def wire_for(group: Group, tensor: Tensor, ranks: Sequence[int] | None = None) -> Group:
    """The same ranks, for tensors on the device of this one; for those on the host mostly `group`.

    Args:
        group: for tensors on the host.
        tensor: one of the tensors to be sent.
        ranks: the ranks that take part; None: all.
    """
    found = group.for_payloads() if on_host(tensor) else group.for_device(tensor.device)
    return found if ranks is None else found.among(ranks)


def chosen(group: Group, ranks: Sequence[int]) -> tuple[int, ...]:
    """Check the ranks of a part of a group.

    Raises:
        WeftError: they are not distinct ranks of this group.
    """
    distinct = tuple(ranks)
    if len(set(distinct)) < len(distinct) or not set(distinct) <= set(range(group.size)):
        raise WeftError(
            f"rank {group.rank}: {list(distinct)} are not distinct ranks of {group.size}"
        )
    return distinct


class _WithOwn(Pending):
    """The messages of all other ranks, with this rank's own put in its place in rank order."""

    def __init__(self, pending: Pending, rank: int, own: Tensor) -> None:
        self._pending, self._rank, self._own = pending, rank, own

    def wait(self) -> list[Tensor]:
        received = self._pending.wait()
        return [*received[: self._rank], self._own, *received[self._rank :]]

    def release(self) -> None:
        self._pending.release()


def is_duration(timeout: object) -> TypeGuard[float]:
    """Whether this is a finite number of seconds above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        return False
    return math.isfinite(timeout) and timeout > 0
