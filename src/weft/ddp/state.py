"""The state of the hook, of which each model has one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import check
from ..call.attempt import preparing
from ..call.opening import opened
from ..comm.buckets import reduce_dense
from ..group import process_group
from ..group.group import Group
from ..sparse import Record, last_call
from ..sparse.request import wrong_wire_dtype
from .outermost import Outermost
from .step import Step

NAME = "ddp.register"
_KEPT = 256  # records
# what a copy of a State does not have: the group, and what one model's steps have found
_NOT_COPIED = ("_handle", "joined", "outermost", "step", "is_checked", "unlike")
_log = logging.getLogger("weft")


class State:
    """The state of `hook`, one for each model; `register` makes it.

    It can be copied and pickled. A copy has neither the group nor calls that are running: its group
    is torch.distributed's default group, and its first use is collective among all ranks of that.

    Attributes:
        calls: records (`weft.sparse.Record`) of the last sparse calls, oldest first, at most 256.
            Tables whose buckets follow one another share a call.
    """

    def __init__(
        self,
        group: Group | dist.ProcessGroup | None = None,
        algorithm: str = "auto",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            group: the model's group; None: torch.distributed's default group.
            algorithm: of `weft.sparse_all_reduce`.
            wire_dtype: the dtype in which gradients of wider floating-point dtypes are sent, dense
                and sparse, but not complex ones; None: their own. It must be the same on every
                rank; weft compares it once.
        """
        self._handle = group
        self.joined: Group | None = None  # the group as weft's, once the first use has made it
        self.algorithm = algorithm
        self._wire_dtype = wire_dtype
        self.error: str | None = None  # what is wrong with the model
        # DistributedDataParallel reduces which parameters were used at the end of each backward
        self.finds_unused = False
        self.calls: deque[Record] = deque(maxlen=_KEPT)
        self.step: Step | None = None  # that is under way
        self.outermost = Outermost()  # at whose end errors are raised
        self.is_told_of = False  # what the first step carried
        self.unlike: str | None = None  # what is wrong with the kind of a gradient, not yet told
        # whether a step has ended in which no rank had such a gradient; known to all alike
        self.is_checked = False

    def __getstate__(self) -> dict[str, Any]:
        if self._handle not in (None, dist.group.WORLD):
            _log.warning("a copy of a %s is of the default group", type(self).__name__)
        return {name: each for name, each in vars(self).items() if name not in _NOT_COPIED}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        State.__init__(self)
        vars(self).update(kept)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The `wire_dtype` that was given. It cannot be changed: no rank may change it alone."""
        return self._wire_dtype

    @property
    def meets(self) -> bool:
        """Whether the ranks meet at the end of a step: dense buckets tell nothing."""
        return self.finds_unused or not self.is_checked

    @property
    def group(self) -> Group:
        """The group as weft's. The first access makes it, which is collective.

        Raises:
            WeftError: the ranks' states differ, or one is wrong; the same text on every rank.
        """
        if self.joined is None:
            given = self._handle
            group = given if isinstance(given, Group) else process_group.of_group(given)
            # dense buckets are not compared one by one
            with preparing(group, NAME):
                fields = self.asked()
            tell_of(group, fields | {"kind of state": type(self).__name__})
            self.joined = group
        return self.joined

    def note_call(self, group: Group) -> None:
        """Keep the record of a sparse call that has just ended."""
        record = last_call(group)
        if record is not None:
            self.calls.append(record)

    def tell_first(self, step: Step, sent: int) -> None:
        """Log what weft carries of the model in a step, in which this rank sent so many bytes."""
        _log.info(
            "ddp: tables: %d, dense buckets: %d, sent by rank %d in the first step: %.0f KB",
            step.sparse,
            step.dense,
            self.group.rank,
            sent / 1e3,
        )

    def asked(self) -> dict[str, str]:
        """What must be the same on every rank. Raises WeftError: something is wrong with it."""
        check(self.error or wrong_wire_dtype(self._wire_dtype))
        return {"wire_dtype": str(self._wire_dtype)}

    def reduction(self, bucket: dist.GradBucket) -> Callable[[Group, Tensor], None]:
        """What reduces a dense bucket, in place, in a call whose turn it is."""
        # complex numbers come as real ones, and are sent as they are
        is_real = not any(each.is_complex() for each in bucket.parameters())
        wire_dtype = self.wire_dtype if is_real else None

        def reduction(group: Group, gradient: Tensor) -> None:
            reduce_dense(group, [gradient], "avg", wire_dtype)

        return reduction


def tell_of(group: Group, fields: dict[str, str], own: bytes = b"") -> list[int]:
    """Have all ranks say what they were given, which must be the same.

    Returns:
        What all ranks pass as `own`, combined by bitwise "or".
    """

    def job() -> list[int]:
        return opened(group, NAME, fields, own).mask(len(own))

    return group.worker.call(NAME, job)
