"""Team: the workers of a partition, whatever its shape, and the data of a script's own.

What both kinds of partitions share; a script makes those of `partition`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ... import nn
from ...errors import WeftError
from ...nn.partition import Partition
from .communicator import PROC_NULL, Communicator

__all__ = ["Team"]

_OPERATIONS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Team:
    """Workers, in order; see MPIPartition."""

    def _set(self, grid: Partition, device: torch.device | str | None) -> None:
        self._grid, self._released = grid, False
        self.device = torch.device("cpu") if device is None else torch.device(device)

    @property
    def grid(self) -> Partition:
        """The `weft.Partition` that it is.

        Raises:
            WeftError: it was deactivated.
        """
        if self._released:
            raise WeftError(f"this partition, {self._grid.brief}, was deactivated: make another")
        return self._grid

    @property
    def active(self) -> bool:
        return not self._released and self._grid.active

    @property
    def rank(self) -> int:
        if not self.active:
            return PROC_NULL
        return self._grid.ranks.index(self._grid.rank)

    @property
    def size(self) -> int:
        return self._grid.size

    @property
    def shape(self) -> NDArray[np.int64]:
        return np.array(self._grid.shape, dtype=np.int64)

    @property
    def dim(self) -> int:
        return self._grid.dim

    @property
    def index(self) -> Any:
        return self.rank if self.active else None

    @property
    def comm(self) -> Communicator | None:
        """What a script may call as a communicator of MPI; None if it is not active."""
        return Communicator(self._line) if self.active else None

    _comm = comm

    @property
    def _line(self) -> Partition:
        return self.grid.reshape((self.size,))

    def deactivate(self) -> None:
        """Be inactive from now on. Layers that were made of it still work."""
        self._released = True

    def initialize_backend_comm(self) -> None:
        """Nothing: weft has no other communicators."""

    def broadcast_data(
        self, data: Any, root: int = 0, P_data: Team | None = None
    ) -> NDArray[Any] | None:
        """Data of one worker, on all workers of this partition.

        Args:
            data: an array, or what makes one; read on the root alone.
            root: its rank in `P_data`.
            P_data: a partition of some of these workers; None: this one.

        Returns:
            The array, of at least one dimension; None where this partition is not active.

        Raises:
            WeftError: the root is none of these workers.
        """
        source = (self if P_data is None else P_data)._line.subset([root])
        if not set(source.ranks) <= set(self.grid.ranks):
            raise WeftError(f"the root, {source.brief}, is not in {self.grid.brief}")
        if not self.active:
            return None
        x = torch.from_numpy(np.atleast_1d(data)) if source.active else nn.zero_volume_tensor()
        return _array(nn.Broadcast(source, self._line)(x))

    def allgather_data(self, data: Any) -> NDArray[Any]:
        """Data of all workers on all of them, shape [size, length]; collective in the partition."""
        flat = np.atleast_1d(data).reshape(1, -1)
        return _array(nn.AllGather(self._line, 0)(torch.from_numpy(flat)))

    def allreduce_data(self, data: Any, op: str = "sum") -> NDArray[Any]:
        """Arrays of all workers, of one shape, reduced by "sum", "prod", "min" or "max".

        Raises:
            WeftError: `op` is none of these.
        """
        if op not in _OPERATIONS:
            raise WeftError(f"allreduce_data: op is {op!r}: use {', '.join(_OPERATIONS)}")
        array = np.asarray(data)
        found = _array(nn.AllGather(self._line, 0)(torch.from_numpy(array[None])))
        result: NDArray[Any] = _OPERATIONS[op].reduce(found, axis=0, dtype=array.dtype)
        return result

    def print_sequential(self, val: object) -> None:
        """Print what all workers have to say, in their order, on the first."""
        if self.active:
            said = torch.frombuffer(bytearray(f"{val}\n".encode()), dtype=torch.uint8)
            text = bytes(nn.Gather(self._line, 0)(said).tolist()).decode()
            print(text, end="", flush=True)

    def __eq__(self, other: object) -> bool:
        """Whether this worker is active in both, and they are the same grid."""
        if not isinstance(other, Team):
            return NotImplemented
        return self.active and other.active and self.grid == other.grid

    def __hash__(self) -> int:
        return hash(self._grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._grid.brief}{', deactivated' * self._released})"


def _array(x: torch.Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.numpy()
    return found
