"""Communicators: what a DistDL script says to MPI, and how its partitions are found from one.

DistDL scripts name a communicator to make the first partition of, and call little else of it:
`Barrier()`, a rank, a size. `MPI` stands for mpi4py's module of that name; a communicator of
mpi4py's own serves, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ... import nn
from ...bootstrap.init import init
from ...errors import WeftError
from ...nn.partition import Partition
from ...wire import default
from ...wire.base import Wire

__all__ = ["MPI", "PROC_NULL", "Communicator", "line_of", "set_backend"]

PROC_NULL = -1
"""The rank of a worker in a partition that it is not active in, and of a neighbour beyond an edge.
"""


@dataclass(frozen=True, slots=True)
class Communicator:
    """The workers of a partition, for a script that speaks to them as MPI does.

    Attributes:
        line: the workers, in order; None: all ranks of the default group, once it is there.
    """

    line: Partition | None = None

    @property
    def rank(self) -> int:
        """This worker's place among them; PROC_NULL if it is none of them."""
        index = self._line.index
        return PROC_NULL if index is None else index[0]

    @property
    def size(self) -> int:
        """How many they are."""
        return self._line.size

    def Get_rank(self) -> int:
        """`rank`, as MPI spells it."""
        return self.rank

    def Get_size(self) -> int:
        """`size`, as MPI spells it."""
        return self.size

    def Barrier(self) -> None:
        """Wait until all of them are here; at most the group's timeout.

        Raises:
            WireError: a worker failed, or did not come in time.
        """
        line = self._line
        if line.active:
            nn.AllSumReduce(line, 0)(torch.zeros((), device="cpu"))

    @property
    def _line(self) -> Partition:
        return _everybody() if self.line is None else self.line


class MPI:
    """What scripts take from mpi4py's module of this name, without an MPI.

    Attributes:
        COMM_WORLD: all ranks of weft's default group, which is started if there is none.
        PROC_NULL: the rank of nobody.
    """

    COMM_WORLD = Communicator()
    PROC_NULL = PROC_NULL

    @staticmethod
    def Wtime() -> float:
        """Seconds since some moment in the past."""
        return time.perf_counter()


def set_backend(backend_comm: object = None, backend_array: object = None) -> None:
    """Nothing: DistDL chooses here between MPI and NCCL, NumPy and CuPy, and weft needs none."""


def line_of(comm: Any) -> Partition:
    """The ranks of a communicator or a group, in order.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks; a Communicator; whatever `group=` of weft's calls
            takes; or a communicator of mpi4py, which is asked for its ranks: collective in it.

    Raises:
        WeftError: it is none of these, or mpi4py's COMM_NULL, or a communicator whose processes are
            not weft's ranks.
    """
    if comm is None:
        return _everybody()
    if isinstance(comm, Communicator):
        return _everybody() if comm.line is None else comm.line
    if hasattr(comm, "Get_rank") and hasattr(comm, "allgather"):
        if not comm:  # as mpi4py's COMM_NULL is, which has nobody to ask
            raise WeftError(
                f"rank {_world().rank}: MPI.COMM_NULL tells nothing of the workers of a partition: "
                "make it on all of them, by create_partition_inclusive of MPIPartition()"
            )
        ranks = [int(rank) for rank in comm.allgather(_world().rank)]
        if len(set(ranks)) < len(ranks):
            raise WeftError(
                f"the processes of this communicator are ranks {ranks} of weft's group: start both "
                "by the same launcher, so that each process is one rank of either"
            )
        return Partition(len(ranks), ranks=ranks)
    return Partition(default.resolve(comm).size, group=comm)


def _everybody() -> Partition:
    return Partition(_world().size)


def _world() -> Wire:
    """The default wire. DistDL needs no start, so where there is none, it is started here."""
    try:
        return default.current()
    except WeftError:
        return init()
