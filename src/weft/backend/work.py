"""What a caller of torch.distributed waits for: weft's calls with the face of its `Work`.

C++ reads these too (DistributedDataParallel, functional collectives), through `wait` and
`get_future` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..wire.base import Pending, Wire
from ..wire.worker import Work

__all__ = ["Ended", "Posted", "Queued", "Several", "started"]


def started(
    wire: Wire,
    name: str,
    job: Callable[[], list[Tensor]],
    options: Any,
    *,
    leave: bool = False,
) -> Ended | Queued:
    """Run a collective on a wire when its turn has come.

    A caller who is going to wait anyway (`asyncOp` of its options is False) runs it himself, which
    saves two hand-overs between threads. If `leave`, the worker leaves it to who serves it.

    Raises:
        Exception: whatever the job raises, if the caller runs it.
    """
    if getattr(options, "asyncOp", True):
        return Queued(wire.worker.submit(name, job, leave=leave))
    return Ended(wire.worker.call(name, job))


class Ended(dist.Work):
    """A collective that is done."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Queued(dist.Work):
    """A collective in the queue of a wire's worker."""

    def __init__(self, work: Work[list[Tensor]]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended; no time is torch's word for no limit of one's own.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            Exception: whatever the collective raised.
        """
        self._work.wait(timeout if timeout > timedelta(0) else None)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._work.get_future()


class Several(dist.Work):
    """Works of another backend, waited for together."""

    def __init__(self, works: Sequence[dist.Work], tensors: list[Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them.

        Raises:
            RuntimeError: what the backend raises.
        """
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda _: self._tensors)


class Posted(dist.Work):
    """A message of `send` or `recv` under way; it is through once it was waited for."""

    def __init__(
        self, pending: Pending, source: int, tensors: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """`tensors` are the caller's, each with the contiguous one that is received into."""
        super().__init__()
        self._pending, self._source, self._tensors = pending, source, tensors
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is through, as long as the wire's deadline allows.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        if not self._done:
            self._pending.wait()
            self._pending.release()
            for given, contiguous in self._tensors:
                if given is not contiguous:
                    given.copy_(contiguous)
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source
