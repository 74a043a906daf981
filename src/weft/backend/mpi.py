"""Backend "weft_mpi": every collective of torch.distributed over MPI, on CPU tensors of any dtype.

`weft.init(backend="mpi")` uses it. `send` and `recv` have a group of their own, on which many
messages may be pending.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import _torch
from ..base.errors import WeftError
from ..base.tensors import plain
from ..group.joining import connect
from .group import Answers, PythonGroup, sendable
from .tensors import elements
from .work import Posted


class MpiGroup(PythonGroup):
    """A group of backend "weft_mpi", on one rank.

    Attributes:
        timeout: seconds that any one wait may last.
    """

    wire_name = "mpi"  # by which `process_group.of_group` joins the ranks

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout.total_seconds()
        self._name = ""
        if _torch.backend_base() is not None:  # there C++ wants to find a backend, if not to use it
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._inside = Answers("weft_mpi", rank, size)
            self._register_backend(torch.device("cpu"), kind, self._inside)
            self._set_default_backend(kind)
        # made here, where all ranks take part: later messages concern two of them only
        self._messages = connect(
            store, rank, size, self.timeout, name="messages", wire=self.wire_name
        )

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft_mpi"

    # torch asks the backends inside a group for these; this group has none inside

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether several messages can be posted as one."""
        return False

    @_torch.uncompiled
    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        given = [plain(each) for each in self._given(tensors)]
        pending = self._messages.post([(target, each) for each in given], (), tag)
        return Posted(pending, self.rank())

    @_torch.uncompiled
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        places = self._given(tensors)
        # by size, since what is sent may be shorter
        pending = self._messages.post((), [(source, place.nbytes) for place in places], tag)
        return Posted(pending, source, places)

    def _given(self, tensors: Any) -> list[Tensor]:
        """The elements of tensors to be sent, or to be received in."""
        return [elements(each) for each in sendable(self.rank(), tensors)]

    @_torch.uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise WeftError(
            f"rank {self.rank()}: this backend receives from a rank that is named: pass src="
        )

    def abort(self) -> None:
        """Break the group: all waits of every rank end with an error."""
        for group in (self._weft_group, self._messages):
            if group is not None:
                group.abort("its process group was aborted")

    def shutdown(self) -> None:
        super().shutdown()
        self._messages.close()
