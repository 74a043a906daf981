"""The verbs of a process group of torch's, of whatever backend, under weft's failure detector.

Where the host waits, in a verb of the CPU or in a `read` of a device's numbers, it does so in a
wait of the session: whoever dies is named, and the deadline holds. A verdict aborts the process
group, which ends what hangs in a stream; so weft has no thread or event that would watch it.

Synchronous calls use the program's own process group, behind what the program has queued there.
Asynchronous calls run on weft's thread, beside the program's own collectives, with which they would
mix: they have a process group of their own, and so do calls of some of the ranks. It is made in the
first such call, behind its opening: everybody is there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base._torch import new_process_group, store_of
from ..base.arguments import LONGEST, in_words
from ..base.devices import IN_A_GRAPH, claim_thread, is_capturing
from ..base.errors import WeftError, in_short
from ..base.latch import NAP
from ..base.memory import bytes_of, fresh
from ..base.within import Asking, within
from ..group.group import Group
from ..group.wires import is_of_a_signal
from ..wire.interface import Failure, WireFailed

_NOTHING_COMES = 1 << 30  # a tag that no message has
_MOMENT = 0.5  # seconds that the end of a process group is awaited

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and divided: not all backends have an average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
# what every backend takes; half precision would be added in half precision
_REDUCED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)

_log = logging.getLogger("weft")


class GroupVerbs:
    """The verbs of a process group; a `Verbs`.

    Attributes:
        rank, size, name: as of `Verbs`.
    """

    def __init__(
        self, group: Group, device: torch.device, backend: str, *, is_own: bool = False
    ) -> None:
        """
        Args:
            group: the ranks, which have a process group, or are some of one's.
            device: of the tensors.
            backend: of that process group, for such tensors.
            is_own: whether it is one of weft's own, and not the program's.
        """
        self.rank = group.rank
        self.size = group.size
        self.name = f"{device.type} ({backend}{', asynchronously' if is_own else ''})"
        self._group = group
        self._backend = backend
        self._is_own = is_own or group.process_group() is None
        self._device = device
        self._made: dist.ProcessGroup | None = None  # of weft's own
        self._is_connected = backend == "gloo" and not self._is_own  # as torch made it
        self._failure: Failure | None = None
        self._aborting = threading.RLock()
        self._is_ended = False  # its process groups, or weft has let go of them

    def all_gather(self, mine: Tensor) -> Tensor:
        own = bytes_of(mine)
        found = fresh((self.size * own.numel(),), torch.uint8, mine.device)
        self._count([own.numel()] * self.size)
        self._run("all_gather", lambda group, later: _all_gather(found, own, group, later))
        return found.view(mine.dtype)

    def exchange(self, mine: Tensor, goes: Sequence[int], comes: Sequence[int]) -> Tensor:
        # as bytes, since no backend takes all dtypes
        to, of = ([count * mine.itemsize for count in counts] for counts in (goes, comes))
        sent = bytes_of(mine)
        found = fresh((sum(of),), torch.uint8, mine.device)
        self._count(to)
        self._run(
            "all_to_all",
            lambda group, later: dist.all_to_all_single(
                found, sent, of, to, group=group, async_op=later
            ),
        )
        return found.view(mine.dtype)

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        return op in _OPS and dtype in _REDUCED

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        # about what any algorithm sends: twice its part of the tensor
        self._count([2 * tensor.nbytes // self.size] * self.size)
        self._run(
            "all_reduce",
            lambda group, later: dist.all_reduce(tensor, _OPS[op], group=group, async_op=later),
        )
        if op == "avg":
            tensor.div_(self.size)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._count([tensor.nbytes if self.rank == root else 0] * self.size)
        flat = bytes_of(tensor)
        self._run(
            "broadcast",
            lambda group, later: dist.broadcast(flat, group=group, group_src=root, async_op=later),
        )

    def read(self, numbers: Tensor) -> list[int]:
        return read(self._group, numbers, self.name)

    def _run(self, what: str, verb: Callable[[dist.ProcessGroup, bool], Any]) -> None:
        """Call a verb of the process group, in a wait of the session's.

        The host waits for gloo in steps, between which it looks for a verdict: what ends gloo's
        waits does not end that for a message of which a part has come.
        """
        if not self._is_connected:
            self._connect()

        def run() -> None:
            group = self._process_group()
            work = verb(group, self._backend == "gloo")
            while work is not None and not _is_through(work):
                if self._is_over():
                    if self._is_own:  # which will be closed, and that waits for what is under way
                        _end_gloo(group)
                    raise RuntimeError("the group has ended")

        self._wait(what, run)

    def _wait(self, what: str, body: Callable[[], Any]) -> Any:
        wait = _Wait(self._group, f"{what} over {self.name}", body, self.failure)
        return self._group.session.wait_for(wait)

    def _process_group(self) -> dist.ProcessGroup:
        """The program's, or weft's own."""
        group = self._made if self._is_own else self._group.process_group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def _connect(self) -> None:
        """Make a process group, if it is to be one of weft's own, and have its ranks connect.

        So it is in the first call: all ranks are here. No `dist.new_group`, whose names follow from
        how many groups a rank has made: of ranks that were in calls of other subsets each has made
        another number.
        """
        token = ""
        if self._is_own:
            token = self._group.all_gather_bytes(secrets.token_bytes(8), bytes)[0].hex()
        on_host = self._device.type == "cpu"
        stream = None if on_host else torch.accelerator.current_stream(self._device)
        meet = functools.partial(self._meet, token, stream)
        self._wait("the making of a process group", lambda: self._until(meet))
        self._is_connected = True

    def _until(self, meet: Callable[[], None]) -> None:
        """Wait for a thread that connects the ranks.

        Nothing ends the wait of a backend that connects, as NCCL does within its first collective,
        for a rank that does not come. A verdict leaves the thread there.
        """
        connecting = Asking(meet)
        while not connecting.ends(NAP) and not self._is_over():
            pass
        connecting.answer()

    def _meet(self, token: str, stream: torch.Stream | None) -> None:
        """Make a group of weft's own, and have all ranks send something; in weft's own thread.

        Args:
            token: which these ranks alone have.
            stream: of the call; in another, such as the default one, the program may have queued
                what waits for other ranks.
        """
        with contextlib.ExitStack() as streams:
            if stream is not None:
                claim_thread(self._device)
                streams.enter_context(stream)
            if self._is_own:
                self._made = self._new(token)
            if not self._is_over():
                number = torch.zeros(1, device=self._device)
                dist.all_reduce(number, group=self._process_group())

    def _new(self, token: str) -> dist.ProcessGroup:
        """A new process group of the ranks that have this token; collective."""
        world = dist.group.WORLD
        store: Any = None if world is None else store_of(world)
        if store is None:
            raise RuntimeError("the process group was destroyed")
        # a client of the store's own: whoever else uses it waits for the others meanwhile
        space = dist.PrefixStore(f"weft/verbs/{token}", store.clone())
        place = self._device.type, space, self.rank, self.size
        # weft's own deadline, which may change, is that of all waits
        return new_process_group(self._backend, *place, LONGEST)

    def _count(self, nbytes: Sequence[int]) -> None:
        """Count what goes to each rank."""
        self._group.traffic.count_bytes([(peer, nbytes[peer]) for peer in self._group.peers])

    # what ends waits

    def _is_over(self) -> bool:
        """Whether there is a verdict, or this rank has left."""
        return self._failure is not None or self._group.session.closed

    def failure(self) -> Failure | None:
        """Why it ended, as a wire says it; None: it has not."""
        return self._failure

    def abort(self, failure: Failure) -> None:
        """End what is under way; the detector's thread calls it, so it waits for a moment only.

        Who gets the error waits, too: a collective of the program's that began meanwhile might wait
        for ever, since gloo tells no send that it has queued when the connection closes.
        """
        with self._aborting:
            if self._is_ended:
                return
            self._failure = self._failure or failure
            end = _end_gloo if self._backend == "gloo" else _end
            # the program's own, too: whoever is to blame here would be awaited there
            for group in (self._made, self._group.session.process_group()):
                if group is not None:
                    with contextlib.suppress(TimeoutError):  # it goes on
                        within(_MOMENT, functools.partial(end, group))
            self._is_ended = True  # only now: an interrupt may come in the middle

    def close(self) -> None:
        """Let go of a process group of weft's own."""
        made: Any = self._made
        self._made = None
        if made is not None and self._failure is None:
            made.shutdown()
        self._failure = self._failure or Failure("aborted", None, "the group was closed")
        self._is_ended = True


class _Wait:
    """A wait of the host in a verb, as the session and its detector see it: one of all ranks."""

    opens = False

    def __init__(
        self,
        group: Group,
        what: str,
        run: Callable[[], Any],
        failure: Callable[[], Failure | None],
    ) -> None:
        self._group = group
        self._what = what
        self._run = run
        self._failure = failure

    def receive(self) -> Any:
        """Raises WireFailed where the process group raised."""
        try:
            return self._run()
        except Exception as error:  # torch, too, fails where it reports on a group of weft's own
            if is_of_a_signal(error):
                raise
            text = f"{self._what} failed: {in_short(in_words(error))}"
            raise WireFailed(self._failure() or Failure("lost", None, text)) from error

    def peer(self) -> int | None:
        return next(iter(self.awaited()), None)

    def awaited(self) -> list[int]:
        return [self._group.rank_in_errors(peer) for peer in self._group.peers]

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        return f"was in {self._what}"


def read(group: Group, numbers: Tensor, name: str = "") -> list[int]:
    """Integers on the host, for which it waits under the group's deadline.

    Args:
        group: whose deadline it is.
        numbers: of an integer dtype; on any device.
        name: of who carries tensors of that device, for an error.

    Raises:
        WeftError: the stream records a CUDA graph, in which nothing can be read.
        WireError: the group is broken; then what the stream computed may be garbage.
    """
    if is_capturing(numbers.device):
        raise WeftError(IN_A_GRAPH)
    if numbers.is_cpu:
        found: list[int] = numbers.tolist()
        return found
    wait = _Wait(group, f"a read behind {name or numbers.device}", numbers.tolist, lambda: None)
    found = group.session.wait_for(wait)
    group.check()  # an abort ends what the stream waits for, and leaves garbage
    return found


def _all_gather(found: Tensor, mine: Tensor, group: dist.ProcessGroup, later: bool) -> Any:
    """Torch's all-gather into one tensor, by the name that it has in this release."""
    into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return into(found, mine, group=group, async_op=later)


def _is_through(work: Any) -> bool:
    """Wait for a call of gloo's for a moment; whether it is through. Raises what it has raised."""
    try:
        work.wait(timedelta(seconds=NAP))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended since, or raised
    return True


def _end(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _log.warning("a process group could not be aborted: %s", error)


def _end_gloo(group: Any) -> None:
    """A receive of gloo's that runs out closes the connections, and so ends all waits."""
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, _NOTHING_COMES).wait(timedelta(milliseconds=1))
