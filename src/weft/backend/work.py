"""torch.distributed's `Work`, for weft's calls: what a caller waits for.

C++ code uses them, too (DistributedDataParallel, functional collectives), by `wait` and
`get_future` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import _torch
from ..group.worker import Work

NO_LIMIT = timedelta(0)


class Collective(dist.Work):
    """A collective in the queue of a group's worker; or one that is done, if `work` is None."""

    def __init__(
        self,
        work: Work[Any] | None,
        tensors: Sequence[Tensor] = (),
        limit: timedelta = NO_LIMIT,
    ) -> None:
        """`limit` holds for a `wait` that has none of its own."""
        super().__init__()
        self._work = work
        self._is_promised = False
        self._tensors = list(tensors)
        self._limit = limit

    def promise(self, tensor: Tensor) -> None:
        """Have torch's `wait_tensor` of this tensor wait for it, too."""
        self._is_promised = True
        _torch.promise(self, tensor)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until it has ended; a timeout of 0 means no limit, as in torch.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: it is no duration. Nothing is broken.
            Exception: whatever the collective raised.
        """
        work = self._work
        if work is not None:
            limit = self._limit if timeout == NO_LIMIT else timeout
            work.wait(None if limit == NO_LIMIT else limit)
            if self._is_promised:  # torch keeps this until somebody waits for the tensors, too
                self._work = None
        return True

    def is_completed(self) -> bool:
        work = self._work
        return work is None or work.is_completed()

    def exception(self) -> BaseException | None:
        work = self._work
        return None if work is None else work.exception()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        work = self._work
        return self._tensors if work is None else work.result() or []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        work = self._work
        if work is not None:
            return work.get_future()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
