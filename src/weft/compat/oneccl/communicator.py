"""Communicators: the group of ranks that an operation is for.

oneCCL's way to a communicator: ranks that share a key-value store (`kvs`) make one of it. A program
that has a group already, of torch.distributed or of `weft.init`, needs none of that.
"""

from __future__ import annotations

import operator
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...agree import agree
from ...errors import WeftError
from ...wire import default, process_group
from ...wire.base import Wire, is_duration
from .kvs import TIMEOUT, Kvs

__all__ = ["Communicator", "create_communicator"]


class Communicator:
    """A group of ranks; closes what it opened when it is closed, or at the end of a `with` block.

    Attributes:
        wire: the group as the rest of weft knows it: `group=` of every call takes it.
    """

    __slots__ = ("_owned", "wire")

    def __init__(self, wire: Wire, *, owned: bool = False) -> None:
        self.wire, self._owned = wire, owned

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank()} of {self.size()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rank(self) -> int:
        """This process's number in the group."""
        return self.wire.rank

    def size(self) -> int:
        """How many ranks there are."""
        return self.wire.size

    def split(self, color: int) -> Communicator:
        """The communicator of the ranks that pass the same color, in their order; collective.

        Raises:
            WeftError: a rank's color is no integer of 64 bits; on every rank.
        """
        wire = self.wire
        wrong, number = None, _integer(color)
        if number is None or not -(2**63) <= number < 2**63:
            wrong, number = f"color is {color!r}: pass an integer of 64 bits", 0
        mine = torch.tensor([number]).view(torch.uint8)

        def side_by_side(lower: Tensor, upper: Tensor) -> Tensor:
            return torch.cat([lower, upper])

        def job() -> Wire:
            agreement = agree(wire, "split", {}, wrong, mine, side_by_side)
            colors = torch.cat([body.clone() for body in agreement.bodies]).view(torch.int64)
            agreement.release()
            parts = [
                wire.sub([rank for rank, each in enumerate(colors.tolist()) if each == one])
                for one in sorted(set(colors.tolist()))
            ]
            return next(part for part in parts if part is not None)

        return Communicator(wire.worker.call("split", job), owned=True)

    def close(self) -> None:
        """Leave a group that was made for this communicator; any other stays as it is."""
        if self._owned:
            self.wire.close()


def create_communicator(
    size: int | None = None,
    rank: int | None = None,
    kvs: Kvs | dist.Store | None = None,
    *,
    timeout: float = TIMEOUT,
) -> Communicator:
    """The default group, or a new one among processes that share a key-value store.

    Args:
        size: how many ranks there are; None, as all three: the default group.
        rank: which of them this is.
        kvs: where they meet: of `create_main_kvs` or `create_kvs`, or a torch store. Communicators
            that are made on one store one after the other do not mix.
        timeout: seconds that meeting, and then any one wait, may last.

    Raises:
        WeftError: some of the three are missing or cannot be, or there is no default group.
        WireError: not all ranks came.

    Example:
        >>> from weft.compat.oneccl.kvs import create_main_kvs
        >>> with create_communicator(1, 0, create_main_kvs("127.0.0.1")) as comm:
        ...     comm
        <Communicator rank 0 of 1>
    """
    if size is None and rank is None and kvs is None:
        return Communicator(default.current())
    if size is None or rank is None or kvs is None:
        raise WeftError("pass size, rank and kvs together, or none of them for the default group")
    count, number = _integer(size), _integer(rank)
    if count is None or number is None:
        raise WeftError(f"size is {size!r} and rank is {rank!r}: pass two integers")
    store = kvs.store if isinstance(kvs, Kvs) else kvs
    if not isinstance(store, dist.Store):
        raise WeftError(
            f"kvs is a {type(kvs).__name__}: make it by create_main_kvs or create_kvs, or pass a "
            "store of torch"
        )
    if not is_duration(timeout):
        raise WeftError(f"timeout is {timeout!r}: pass a number of seconds")
    return Communicator(process_group.connect(store, number, count, timeout), owned=True)


def _integer(given: object) -> int | None:
    """An integer of Python's or NumPy's, also a bool, as an int; None of anything else."""
    try:
        return int(operator.index(given))  # type: ignore[arg-type]  # whatever is none raises
    except TypeError:
        return None
