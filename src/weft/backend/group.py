"""What groups written in Python have in common: the class, and the wire that is theirs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..wire import process_group
from ..wire.base import Wire

__all__ = ["PythonGroup"]

# To mypy it is Any: its stubs are those of the C++ class, whose overloads a method written in
# Python serves all at once, and whose constructor takes a store, which that of a Python group
# does not.
_ProcessGroup: Any = dist.ProcessGroup


class PythonGroup(_ProcessGroup):  # type: ignore[misc]  # as said above
    """One rank's end of a group whose collectives, or some of them, go over a wire of weft's."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._wire: process_group.GroupWire | None = None

    @property
    def wire(self) -> Wire:
        """The group's wire, that of `weft.sparse_all_reduce(group=...)` too.

        The first call that needs it makes it, collectively.
        """
        wire = self._wire
        if wire is None or wire.closed:
            wire = self._wire = process_group.of_group(self)
        return wire

    def shutdown(self) -> None:
        """Leave: the peers learn that this is no death. Twice is fine."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
