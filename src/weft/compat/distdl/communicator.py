"""The communicators from which scripts make their first partition, with or without mpi4py.

`MPI` takes the place of mpi4py's module of that name, and `Communicator` that of its communicators,
with the few methods that scripts call. They work over weft and need neither MPI nor mpi4py. A
communicator of mpi4py can be used, too: `line_of` finds which ranks its processes are.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import weft
from weft import Partition, WeftError, nn
from weft.base.arguments import in_words, shown
from weft.base.tensors import leads_twice, mark_overwritten
from weft.bootstrap import TIMEOUT, connect_store, host_store, join

from ..arguments import default, group_of, integer

PROC_NULL = -1
"""The rank of a process that is not in a partition, and of a neighbour beyond an edge of a grid."""

T = TypeVar("T")

Op = Callable[[Any, Any], Any]

Terms = dict[str, Any]
"""What all workers must pass alike to a call, by name."""

_OF_OBJECTS: dict[Op, Op] = {
    np.add: operator.add,
    np.multiply: operator.mul,
    np.minimum: min,
    np.maximum: max,
}
"""What an operation of `MPI` does with two objects: `MPI.SUM` joins two lists, as in mpi4py."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """The workers of a partition, with methods of MPI's communicators.

    A buffer is a NumPy array of numbers, a tensor on the CPU, another object with Python's buffer
    protocol, or a list of one of these and its MPI type, without a count: `[array, MPI.DOUBLE]`. A
    wait lasts at most the group's timeout.

    `Barrier`, `Split`, `Allreduce`, `Iallreduce`, `Reduce`, `Bcast` and `exchange` are collective
    among the workers, and so are the methods in lower case: `gather`, `allgather`, `bcast` and
    `allreduce` take any object that can be pickled. `Send` and `Recv` are between two workers. If
    an argument is wrong on one worker, or those of the workers do not fit together, all of them
    raise WeftError with the same text, which names the rank; no buffer was written, and the next
    call works. They raise WireError if a peer or a link failed.

    Attributes:
        line: the workers, in order, as a 1-D `weft.Partition`; None: all ranks of the default
            group, which is started at the first use.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     half, found = MPI.COMM_WORLD.Split(group.rank % 2), np.zeros(1)
        ...     half.Allreduce(np.array([float(group.rank)]), found, op=MPI.SUM)
        ...     return half.size, found.item()
        >>> run(3, program)
        [(2, 2.0), (1, 1.0), (2, 2.0)]
    """

    line: Partition | None = None

    @property
    def rank(self) -> int:
        """This worker's number among them; PROC_NULL if this process is none of them."""
        index = self._line.index
        return PROC_NULL if index is None else index[0]

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._line.size

    def Get_rank(self) -> int:
        """`rank`, as MPI spells it."""
        return self.rank

    def Get_size(self) -> int:
        """`size`, as MPI spells it."""
        return self.size

    def Barrier(self) -> None:
        """Wait until all workers have called it.

        Raises:
            WireError: a worker failed, or did not call it in time.
        """
        line = self._line
        if line.active:
            nn.AllSumReduce(line, 0)(torch.zeros((), device="cpu"))

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """The communicator of the workers that pass the same color, sorted by key, then by rank."""
        told = self.exchange("Split", lambda: ({}, (_whole("color", color), _whole("key", key))))
        chosen = [(at, place) for place, (each, at) in enumerate(told) if each == color]
        return Communicator(self._line.subset([place for _, place in sorted(chosen)]))

    def Dup(self) -> Communicator:
        """A communicator of the same workers. It shares the connections of this one."""
        return Communicator(self.line)

    def Free(self) -> None:
        """Do nothing: a communicator holds nothing that must be freed."""

    def Get_group(self) -> Group:
        """The workers, without a way to communicate."""
        return Group(self._line)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = np.add) -> None:
        """Reduce arrays over the workers, in rank order, into a buffer on every worker.

        Args:
            sendbuf, recvbuf: of the same dtype and number of elements; `sendbuf` has the same shape
                and dtype on all workers. `MPI.IN_PLACE` as `sendbuf`: what `recvbuf` holds.
            op: of `MPI` or mpi4py, or a function of two numbers; the same on all workers.
        """

        def passed() -> tuple[Terms, NDArray[Any]]:
            array = _sent(sendbuf, recvbuf)
            _check_place(recvbuf, array)
            return {"op": _name_of(op), **terms_of(array)}, array

        _fill(recvbuf, reduced(self.exchange("Allreduce", passed), op))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = np.add) -> Request:
        """The same, with a request for the result. It is complete when this returns.

        So a worker that has calls on two communicators makes them in the order of the others.
        """
        self.Allreduce(sendbuf, recvbuf, op)
        return Request()

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = np.add, root: int = 0) -> None:
        """The same, but only the root's `recvbuf` is filled; the others' may be None."""

        def passed() -> tuple[Terms, NDArray[Any]]:
            array = _sent(sendbuf, recvbuf)
            chosen = self._worker("root", root)
            if self.rank == chosen:
                _check_place(recvbuf, array)
            return {"root": chosen, "op": _name_of(op), **terms_of(array)}, array

        arrays = self.exchange("Reduce", passed)
        total = reduced(arrays, op)  # everywhere: if the op raises, all workers do
        if self.rank == root:
            _fill(recvbuf, total)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Fill all workers' buffers with the content of the root's, of the same dtype and size."""

        def passed() -> tuple[Terms, NDArray[Any]]:
            chosen = self._worker("root", root)
            return self._part(buf, chosen, {"root": chosen})

        found = self.exchange("Bcast", passed)[root]
        if self.rank != root:
            _fill(buf, found)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send an array to one worker, which must call `Recv`; to `PROC_NULL` nothing is sent.

        Tags have no effect.
        """
        self._to_one(buf, self.rank, dest)

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        """Fill a buffer with the array that one worker sends, of the same dtype and size.

        From `PROC_NULL` nothing comes, and the buffer stays as it is. Tags have no effect.
        """
        self._to_one(buf, source, self.rank)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all workers, in rank order, on the root; None on the others.

        Raises:
            WeftError: the workers name different roots, or there is no such worker.
        """
        found = self.exchange("gather", lambda: ({"root": self._worker("root", root)}, sendobj))
        return found if self.rank == root else None

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all workers, in rank order.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda group: MPI.COMM_WORLD.allgather("ab"[group.rank]))
            [['a', 'b'], ['a', 'b']]
        """
        return self.exchange("allgather", lambda: ({}, sendobj))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The root's object; those of the others are not read.

        Raises:
            WeftError: the workers name different roots, or there is no such worker.
        """

        def passed() -> tuple[Terms, Any]:
            chosen = self._worker("root", root)
            return {"root": chosen}, obj if self.rank == chosen else None

        return self.exchange("bcast", passed)[root]

    def allreduce(self, sendobj: Any, op: Op = np.add) -> Any:
        """The objects of all workers, reduced in rank order by the operation of Python.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda group: MPI.COMM_WORLD.allreduce([group.rank], op=MPI.SUM))
            [[0, 1], [0, 1]]
        """
        objects = self.exchange("allreduce", lambda: ({"op": _name_of(op)}, sendobj))
        return functools.reduce(_OF_OBJECTS.get(op, op), objects)

    def exchange(self, call: str, passed: Callable[[], tuple[Terms, T]]) -> list[T]:
        """What each worker passes to a call, in rank order: one exchange, in which errors travel.

        Args:
            call: its name.
            passed: returns the terms, which must be the same on all workers, and an object. What it
                raises, all workers raise as WeftError.
        """
        line = self._line
        packed = _packed(lambda: (call, *passed()))
        told = _unpacked(nn.AllGather(line, 0)(packed), line)
        first_call, first_terms, _ = told[0]
        for rank, (other, terms, _) in zip(line.ranks, told, strict=True):
            if other != first_call:
                raise WeftError(
                    f"rank {rank}: it calls {other}, and rank {line.ranks[0]} calls {first_call}: "
                    "make the same call on all workers"
                )
            for name, value in terms.items():
                if value != first_terms[name]:
                    raise WeftError(
                        f"rank {rank}: {call} has {name} {value} here, and {name} "
                        f"{first_terms[name]} on rank {line.ranks[0]}: pass the same on all workers"
                    )
        return [value for _, _, value in told]

    def _worker(self, name: str, given: object) -> int:
        """An argument as the rank of a worker."""
        found = integer(given)
        if found is None or not 0 <= found < self.size:
            raise WeftError(
                f"{name} is {shown(given)}: pass the rank of a worker, 0 to {self.size - 1}"
            )
        return found

    def _part(self, buf: Any, source: int, terms: Terms) -> tuple[Terms, NDArray[Any]]:
        """What a worker passes to a call that fills all buffers with that of the source."""
        if self.rank == source:
            array = sent = numbers(_memory(buf))
        else:
            array, sent = _place(buf), np.empty(0)
        return {**terms, "dtype": _dtype_of(array), "elements": array.size}, sent

    def _to_one(self, buf: Any, source: int, dest: int) -> None:
        """Fill the buffer of one worker with the array of another."""
        other = integer(dest if self.rank == source else source)
        if other == PROC_NULL:
            return
        pair = [self.rank]  # who alone hears of it, if the other is no worker
        if other is not None and 0 <= other < self.size:
            pair = sorted({self.rank, other})

        def passed() -> tuple[Terms, NDArray[Any]]:
            ends = {"source": self._worker("source", source), "dest": self._worker("dest", dest)}
            if len(pair) < 2:
                raise WeftError("it sends to itself: copy the array")
            return self._part(buf, ends["source"], ends)

        arrays = Communicator(self._line.subset(pair)).exchange("Send or Recv", passed)
        if self.rank == dest:
            _fill(buf, arrays[pair.index(source)])

    @property
    def _line(self) -> Partition:
        return self.line or line_of(None)


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of a communicator, without a way to communicate; `Communicator.Get_group`.

    Attributes:
        line: the workers, in order, as a 1-D `weft.Partition`.
    """

    line: Partition

    @property
    def rank(self) -> int:
        """This worker's number among them; PROC_NULL if this process is none of them."""
        return Communicator(self.line).rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.line.size

    def Get_rank(self) -> int:
        """`rank`, as MPI spells it."""
        return self.rank

    def Get_size(self) -> int:
        """`size`, as MPI spells it."""
        return self.size

    def Free(self) -> None:
        """Do nothing: a group holds nothing that must be freed."""


class Request:
    """What `Iallreduce` returns: a call that is complete."""

    def Wait(self) -> bool:
        """Return True at once."""
        return True

    def Test(self) -> bool:
        """Return True: it is complete."""
        return True

    @staticmethod
    def Waitall(requests: Sequence[Any]) -> bool:
        """Wait for each of several requests, mpi4py's among them."""
        for each in requests:
            each.Wait()
        return True


class MPI:
    """The parts of mpi4py's module `MPI` that scripts use, without MPI.

    Attributes:
        COMM_WORLD: all ranks of weft's default group, which is started if there is none.
        PROC_NULL: -1, the rank of no worker.
        IN_PLACE: in place of the buffer to send: what the other buffer holds is sent.
        Request: the class of what `Iallreduce` returns.
        SUM, PROD, MIN, MAX: NumPy's functions.

    Example:
        >>> MPI.SUM([2, 3], [1, 1]), MPI.PROC_NULL
        (array([3, 4]), -1)
    """

    COMM_WORLD = Communicator()
    PROC_NULL = PROC_NULL
    IN_PLACE = "MPI.IN_PLACE"
    Request = Request
    SUM, PROD, MIN, MAX = np.add, np.multiply, np.minimum, np.maximum

    @staticmethod
    def Wtime() -> float:
        """The seconds since a fixed moment in the past."""
        return time.perf_counter()


def numbers(data: Any) -> NDArray[Any]:
    """An array of numbers, in this machine's order of bytes.

    Raises:
        WeftError: the data is none.
    """
    try:
        array = np.asarray(data)
    except Exception as error:  # of a caller's object
        raise WeftError(f"NumPy makes no array of its data: {in_words(error)}") from None
    if array.dtype.kind not in "biufc":
        raise WeftError(f"its data has dtype {array.dtype}: pass an array of numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def terms_of(array: NDArray[Any]) -> Terms:
    """What must be the same of arrays that are gathered or reduced."""
    return {"dtype": _dtype_of(array), "shape": array.shape}


def reduced(arrays: Sequence[NDArray[Any]], op: Op) -> NDArray[Any]:
    """Arrays of one shape and dtype, reduced in their order, in that dtype."""
    each = op if isinstance(op, np.ufunc) else np.frompyfunc(op, 2, 1)
    return np.asarray(functools.reduce(each, arrays), arrays[0].dtype)


def _dtype_of(array: NDArray[Any]) -> str:
    """The dtype of an array, whatever its order of bytes."""
    return array.dtype.newbyteorder("=").name


def _whole(name: str, given: object) -> int:
    """An argument as an integer."""
    found = integer(given)
    if found is None:
        raise WeftError(f"{name} is {shown(given)}: pass an integer")
    return found


def _name_of(op: Any) -> str:
    """By what workers compare their operations; that of a lambda says little."""
    if not callable(op):
        raise WeftError(f"op is {shown(op)}: pass one of MPI's, or a function of two numbers")
    name = getattr(op, "__name__", None)
    if name is None:
        try:
            name = op.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # a text, if it is one of mpi4py's own
        except Exception:  # an older mpi4py's
            name = None
    return name if isinstance(name, str) else type(op).__name__


def _memory(buf: Any) -> NDArray[Any]:
    """A buffer as the array that shares its memory."""
    given = _alone(buf)
    try:
        if isinstance(given, Tensor):
            array = given.detach().numpy()
        elif isinstance(given, np.ndarray):
            array = np.asarray(given)
        else:
            array = np.asarray(memoryview(given))
    except Exception:
        raise WeftError(
            f"its buffer is a {type(given).__name__}, whose memory NumPy cannot share: pass an "
            "array, or a tensor on the CPU"
        ) from None
    if array.dtype.kind not in "biufc":
        raise WeftError(f"its buffer has dtype {array.dtype}: pass an array of numbers")
    return array


def _alone(buf: Any) -> Any:
    """What a buffer is without its MPI type, as in mpi4py's `[array, MPI.DOUBLE]`.

    Raises:
        WeftError: it has a count, or displacements, too.
    """
    if not isinstance(buf, list | tuple) or not buf:
        return buf
    array, *terms = buf
    is_count = (integer(each) is not None or np.ndim(each) for each in terms)
    if integer(array) is None and any(is_count):
        raise WeftError("its buffer has a count: pass that part of the array, array[:count]")
    return array


def _place(buf: Any) -> NDArray[Any]:
    """The same of a buffer that can be written."""
    place = _memory(buf)
    if not place.flags.writeable:
        raise WeftError("its receive buffer is read-only: pass one that can be written")
    if leads_twice(place.shape, place.strides):
        raise WeftError("elements of its receive buffer share memory: pass a copy")
    return place


def _check_place(recvbuf: Any, array: NDArray[Any]) -> None:
    """Check that a receive buffer takes the result of a reduction of such arrays.

    Raises:
        WeftError: it does not.
    """
    place = _place(recvbuf)
    if (_dtype_of(place), place.size) != (_dtype_of(array), array.size):
        raise WeftError(
            f"its receive buffer has {place.size} elements of {place.dtype}, and the result has "
            f"{array.size} of {array.dtype}: pass one of the same dtype and size"
        )


def _sent(sendbuf: Any, recvbuf: Any) -> NDArray[Any]:
    """The array to send of a call with two buffers; mpi4py's IN_PLACE is as good as ours."""
    in_place = sendbuf is MPI.IN_PLACE or type(sendbuf).__name__ == "InPlaceType"
    return numbers(_memory(recvbuf if in_place else sendbuf))


def _packed(make: Callable[[], Any]) -> Tensor:
    """What a function returns as bytes, uint8 [length]; else the reason why there is nothing."""
    reason, value = "", None
    try:
        value = make()
    except Exception as error:
        reason = str(error) if isinstance(error, WeftError) else in_words(error)
    try:
        found = pickle.dumps((reason, value))
    except Exception as error:
        found = pickle.dumps((f"its object cannot be pickled: {in_words(error)}", None))
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def _unpacked(found: Tensor, line: Partition) -> list[Any]:
    """The objects of a line of workers, from their bytes, one after the other.

    Raises:
        WeftError: there is a reason in place of one of them.
    """
    stream = io.BytesIO(found.numpy().tobytes())
    told = [pickle.load(stream) for _ in line.ranks]
    for rank, (reason, _) in zip(line.ranks, told, strict=True):
        if reason:
            raise WeftError(f"rank {rank}: {reason}")
    return [value for _, value in told]


def _fill(buf: Any, found: NDArray[Any]) -> None:
    place = _memory(buf)
    place[...] = found.reshape(place.shape)
    if isinstance(given := _alone(buf), Tensor):
        mark_overwritten([given])


def print_sequential(comm: Any, val: object) -> None:
    """Print `val` of all workers, in rank order, on the first worker. Collective.

    Args:
        comm: a communicator of weft's `MPI` or of mpi4py.
        val: the value, which this worker makes into text.

    Example:
        >>> from weft.testing import run
        >>> _ = run(2, lambda group: print_sequential(MPI.COMM_WORLD, 5 + group.rank))
        5
        6
    """
    texts = comm.gather(f"{val}", root=0)
    if texts is not None:
        print("\n".join(texts), flush=True)


def line_of(comm: Any) -> Partition:
    """The ranks of a communicator or a group, in order, as a 1-D partition.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks; a `Communicator`; what `group=` of weft's calls
            takes; or a communicator of mpi4py, whose processes then exchange their ranks.

    Raises:
        WeftError: it is none of these, or mpi4py's COMM_NULL, or a communicator whose processes are
            not weft's ranks.
    """
    if comm is None:
        return Partition((default() or weft.init()).size)
    if isinstance(comm, Communicator):
        return comm.line or line_of(None)
    if is_mpi(comm):
        if not comm:  # as mpi4py's COMM_NULL is, which has nobody to ask
            raise WeftError(
                "MPI.COMM_NULL tells nothing of the workers of a partition: make it on all of "
                "them, by create_partition_inclusive of MPIPartition()"
            )
        return _line_of_mpi(comm)
    return Partition(group_of(comm).size, group=comm)


def is_mpi(comm: Any) -> bool:
    """Whether this is a communicator of mpi4py, or behaves like one."""
    if isinstance(comm, Communicator):
        return False
    return hasattr(comm, "Get_rank") and hasattr(comm, "allgather")


_PROCESS = secrets.token_hex(8)  # tells this process from all others
_met: dict[tuple[str, ...], weft.Group] = {}
"""The groups of communicators, by their processes: a script may make many of the same processes."""


def _line_of_mpi(comm: Any) -> Partition:
    """The ranks of the processes of a communicator of mpi4py. Collective among these alone.

    If all of them have the default group, they are ranks of it. Otherwise, a communicator of all
    processes of the job starts the default group. A smaller one makes a group of its own, so the
    other processes need not take part.
    """
    group = default()
    told = comm.allgather((_PROCESS, None if group is None else group.rank))
    if any(rank is None for _, rank in told):
        from mpi4py import MPI  # whose communicator this is

        if len(told) < MPI.COMM_WORLD.Get_size():
            processes = tuple(process for process, _ in told)
            if processes not in _met:
                _met[processes] = meet(comm)
            return Partition(len(told), group=_met[processes])
        told = comm.allgather((_PROCESS, weft.init().rank))
    ranks = [rank for _, rank in told]
    if len(set(ranks)) < len(ranks):
        raise WeftError(
            f"the processes of this communicator are ranks {ranks} of weft's group: start both "
            "by the same launcher, so that each process is one rank of either"
        )
    return Partition(len(ranks), ranks=ranks)


def meet(comm: Any) -> weft.Group:
    """A group between the processes of a communicator: its first process hosts their store."""
    store, where = None, None
    if comm.Get_rank() == 0:
        try:
            store, port = host_store()
            where = store.host, port, ""
        except OSError as error:
            where = "", 0, str(error)
    host, port, wrong = comm.bcast(where, root=0)
    if wrong:
        raise WeftError(f"rank 0: no store can listen for the others to meet at: {wrong}")
    if store is None:
        store = connect_store(host, port, TIMEOUT)
    return join(store, comm.Get_rank(), comm.Get_size(), TIMEOUT)
