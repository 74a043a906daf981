"""A step: one reduction of a model's gradients, and the calls that it waits for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..base.devices import accelerators
from ..group.worker import Work


@dataclasses.dataclass
class Step:
    """One reduction of a model's gradients, from its first bucket to its last.

    Its buckets may come in several backwards: in one that runs inside another, as with reentrant
    checkpointing, or in one after the other, as of a model with two losses.

    Attributes:
        backward: in which its first bucket came.
        sent: bytes that this rank had sent before; None: there was no group yet.
        pending: its calls, and what was raised in place of one.
        tables: those that wait for the next bucket.
        bucket: the number of its last bucket by now.
        is_open: whether another bucket is going to come.
        sparse, dense: how many buckets of each kind have come.
    """

    backward: int
    sent: int | None
    pending: list[Work[Any] | Exception] = dataclasses.field(default_factory=list)
    tables: Tables | None = None
    bucket: int = -1
    is_open: bool = True
    sparse: int = 0
    dense: int = 0

    def note(self, bucket: dist.GradBucket) -> None:
        """Note a bucket that has come.

        A static graph's first backward gives all buckets the number 0, also the last: in that no
        table waits behind the second bucket. Every rank sees the same numbers.
        """
        counts = bucket.index() > self.bucket
        self.bucket = bucket.index()
        self.is_open = counts and not bucket.is_last()
        if bucket.buffer().is_sparse:
            self.sparse += 1
        else:
            self.dense += 1

    def errors(self) -> list[Exception]:
        """What its calls raised, once they have ended."""
        found = [error_of(work) for work in self.pending]
        return [error for error in found if error is not None]


class Tables:
    """Sparse gradients that one call is going to reduce.

    Attributes:
        given: in place of what they are reduced, and what that is before.
        ended: completed when `work` has ended, or could not be started. The work itself is not for
            a Future: that looks for tensors in all that it is given.
        work: the call.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: of all of them."""
        self.device = device
        self.given: list[tuple[Tensor, Tensor]] = []
        self.ended: Future[None] = Future(devices=accelerators(device))
        self.work: Work[list[Tensor]] | None = None

    def add(self, gradient: Tensor) -> Future[Tensor]:
        """Take one more; what it will be."""
        # the gradient's own memory, which is kept when the gradient gets that of the result
        self.given.append((gradient, gradient.detach()))

        def result(_: object) -> Tensor:
            if self.work is not None:
                self.work.wait()
            return gradient

        return self.ended.then(result)


def error_of(work: Work[Any] | Exception) -> Exception | None:
    """What became of a call, once it has ended."""
    try:
        if isinstance(work, Exception):
            raise work
        work.wait()
    except Exception as error:
        # its frames hold the work, which holds the error: a cycle that would keep the group a while
        return error.with_traceback(None)
    return None
