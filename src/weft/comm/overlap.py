"""`overlap_grads`: gradients are reduced while backward still runs.

Parameters are put into buckets, the last first, since backward comes to those first. A bucket may
start as soon as all its gradients are there, but always in the same order on every rank: whatever
their batches used, ranks meet in the same bucket. `sync_grads` then does what is left. A rank that
is there already takes part in every bucket that another one starts, with zeros for the gradients
that it does not have, until all of them are there; then they reduce the rest together.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets and their order.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from .._torch import uncompiled
from ..errors import WeftError
from ..wire import default
from ..wire.base import Wire, Work
from .gradients import NAME, Synchronised, finish_of, overlapping
from .named import difference, manifests_of_all
from .opening import opened
from .staging import on_host

_BUCKET = 8 << 20  # bytes of a bucket, but for its last parameter


@uncompiled
def overlap_grads(
    module: nn.Module,
    average: bool = True,
    group: Any = None,
    *,
    bucket_bytes: int = _BUCKET,
    wire_dtype: torch.dtype | None = None,
) -> Overlap:
    """Have the gradients of a module reduced while backward runs; `weft.sync_grads` finishes it.

    Collective, once for each model, on every rank. Afterwards a step is as it was: `backward()`,
    then `weft.sync_grads(module)`, whose arguments must be the ones given here. It raises on every
    rank if they are not on some, or if a gradient changed there after its bucket had begun.

    Args:
        module: the same parameters, by name, dtype and shape, on every rank.
        average: as for `weft.sync_grads`.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        bucket_bytes: gradients are reduced in pieces of so many bytes, or one gradient.
        wire_dtype: as for `weft.sync_grads`.

    Returns:
        What ends it (`remove()`), and lets a backward accumulate alone (`paused()`).

    Raises:
        WeftError: modules or arguments differ; the same text on every rank. A module is overlapped
            already.
        WireError: a peer or a link failed; names the culprit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     model = torch.nn.Linear(2, 1)
        ...     weft.overlap_grads(model, average=False)
        ...     model(torch.full((1, 2), float(wire.rank))).sum().backward()
        ...     weft.sync_grads(model, average=False)
        ...     return model.weight.grad.tolist()
        >>> run(3, program)
        [[[3.0, 3.0]], [[3.0, 3.0]], [[3.0, 3.0]]]
    """
    wire = default.resolve(group)
    return Overlap(wire, module, average, bucket_bytes, wire_dtype)


class Overlap:
    """The gradients of one module on their way while backward runs; made by `overlap_grads`."""

    def __init__(
        self,
        wire: Wire,
        module: nn.Module,
        average: bool,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._wire, self._average, self._wire_dtype = wire, average, wire_dtype
        self._synchronised = Synchronised(wire, module, average, wire_dtype)
        self._paused = False
        self._handles: list[RemovableHandle] = []
        names = self._agreed_order(module, bucket_bytes)
        self._module = weakref.ref(module)  # whose hooks keep this alive
        self._order = names
        self._ends: list[int] = []  # of each bucket, in the order
        size = 0
        for number, name in enumerate(names, 1):
            size += self._synchronised.size(name)
            if size >= bucket_bytes or number == len(names):
                self._ends.append(number)
                size = 0
        self._bucket_of = {
            name: bucket
            for bucket in range(len(self._ends))
            for name in names[self._start(bucket) : self._ends[bucket]]
        }
        self._restart()
        for name in names:
            parameter: Any = self._synchronised.parameter(name)  # the method below is untyped
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))
                self._handles.append(handle)
        overlapping[module] = self._finish

    def remove(self) -> None:
        """Let backward alone again; `weft.sync_grads` then does all of it. Twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        module = self._module()
        if module is not None and overlapping.get(module) == self._finish:
            del overlapping[module]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward in here only accumulates; the next one outside of it is reduced.

        Example:
            >>> import torch, weft
            >>> with weft.init():
            ...     model = torch.nn.Linear(2, 1)
            ...     overlap = weft.overlap_grads(model)
            ...     with overlap.paused():
            ...         model(torch.ones(1, 2)).sum().backward()
            ...     model(torch.ones(1, 2)).sum().backward()
            ...     weft.sync_grads(model)
            ...     model.weight.grad
            tensor([[2., 2.]])
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _agreed_order(self, module: nn.Module, bucket_bytes: object) -> list[str]:
        """The last parameters first, where all modules have them in one order; else by name."""
        wire, synchronised, error = self._wire, self._synchronised, self._synchronised.error
        whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
        if error is None and not (whole and bucket_bytes > 0):  # type: ignore[operator]  # an int
            error = f"bucket_bytes is {bucket_bytes!r}: pass a positive number of bytes"
        if error is None and finish_of(module) is not None:
            error = "gradients of the module overlap already: remove() that first"
        own = list(reversed(synchronised.in_order))
        code = hashlib.blake2b("\n".join(own).encode(), digest_size=8).digest()
        order = int.from_bytes(code, "little", signed=True)
        fields = {
            "average": self._average,
            "wire_dtype": str(self._wire_dtype),
            "bucket_bytes": bucket_bytes,
        }

        def job() -> list[str]:
            with opened(wire, "overlap_grads", fields, error, digest=synchronised.digest) as said:
                same = said.equal
            if not same:
                everyone = manifests_of_all(wire, "overlap_grads", synchronised.manifest)
                raise WeftError(f"the modules differ: {difference(everyone, missing=True)}")
            with opened(wire, "overlap_grads (order)", {}, None, digest=order) as said:
                return own if said.equal else sorted(own)

        return wire.worker.call("overlap_grads", job)

    def _start(self, bucket: int) -> int:
        return self._ends[bucket - 1] if bucket else 0

    def _restart(self) -> None:
        self._missing = [self._ends[b] - self._start(b) for b in range(len(self._ends))]
        self._seen: set[str] = set()
        self._works: list[Work[bool]] = []
        self._changed: str | None = None  # what was, too late

    def _hook(self, name: str) -> Any:
        def seen(parameter: Tensor) -> None:
            if self._paused:
                return
            bucket = self._bucket_of[name]
            if bucket < len(self._works):  # said, by all ranks, when all have come to sync_grads
                self._changed = self._changed or (
                    f"the gradient of {name!r} changed while it was reduced and holds anything: "
                    "call weft.sync_grads after each backward, or let those that only accumulate "
                    "run in paused()"
                )
                return
            if name not in self._seen:
                self._seen.add(name)
                self._missing[bucket] -= 1
                self._start_ready()

        return seen

    def _start_ready(self) -> None:
        """Start the buckets whose turn it is and whose gradients are all there."""
        while len(self._works) < len(self._ends) and not self._missing[len(self._works)]:
            bucket = len(self._works)
            names = self._order[self._start(bucket) :]
            here = [self._synchronised.parameter(name).grad for name in names]
            if any(gradient is not None and not on_host(gradient) for gradient in here):
                torch.accelerator.synchronize()  # the worker's thread does not follow this stream
            self._works.append(self._wire.worker.submit(NAME, self._step(bucket, ready=True)))

    def _step(self, bucket: int, *, ready: bool) -> Any:
        names, first = self._order[self._start(bucket) :], self._ends[bucket] - self._start(bucket)

        def job() -> bool:
            with record_function("weft::sync_grads"):
                return self._synchronised.reduce(names, first=first, ready=ready)

        return job

    def _is_replaced(self) -> bool:
        """Whether some of the module's parameters are not those whose gradients are seen."""
        module = self._module()
        there = dict(module.named_parameters(remove_duplicate=False)) if module else {}
        known = self._synchronised
        return len(there) != len(known.manifest) or any(
            there.get(name) is not known.parameter(name) for name in known.names
        )

    def _finish(
        self,
        wire: Wire,
        average: bool,
        wire_dtype: torch.dtype | None,
        error: str | None = None,
    ) -> None:
        """What `sync_grads` does with this module; all that has begun ends, whatever is wrong."""
        failure: WeftError | None = None
        try:
            error = error or self._changed
            same = average is self._average and wire_dtype is self._wire_dtype
            if wire is not self._wire or not same:
                error = (
                    "sync_grads has another group, average or wire_dtype than overlap_grads had: "
                    "pass the same"
                )
            elif self._is_replaced():
                error = (
                    "the module has other parameters than when overlap_grads was called: remove() "
                    "that and call it again"
                )
            for bucket in range(len(self._ends)):
                try:
                    if bucket < len(self._works):
                        self._works[bucket].wait()
                    elif not self._wire.worker.call(NAME, self._step(bucket, ready=False)):
                        break
                except WeftError as raised:  # on every rank, some of which have begun more buckets
                    failure = failure or raised
            if failure is not None:
                raise failure
            self._wire.worker.call(NAME, functools.partial(self._end, error))
        finally:
            self._restart()

    def _end(self, error: str | None) -> None:
        """Tell each other what went wrong since buckets began; all ranks are in `sync_grads`."""
        with opened(self._wire, NAME, {}, error):
            return
