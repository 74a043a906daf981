"""`overlap_grads`: gradients are reduced while backward still runs.

Parameters are put into buckets, the last parameters first, since backward reaches them first. A
bucket starts when all its gradients are there, and buckets start in the same order on every rank,
whatever parameters a rank's batch used. `sync_grads` does the rest. A rank that is in `sync_grads`
takes part in every bucket that another rank starts, with zeros for gradients that it does not have.
When all ranks are in `sync_grads`, they reduce the remaining buckets together.

A gradient is reduced where it lies. But where autograd made it, what it is a part of may lie there,
too, which backward has yet to read: then it gets memory of its own before.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets and their order.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base._torch import is_held_by_others, uncompiled
from ..base.devices import Aside
from ..base.errors import WeftError, entry
from ..base.tensors import has_elements, is_made_of_others, times_written
from ..call.attempt import confess, preparing
from ..call.terms import agreed
from ..group import default
from ..group.group import Group
from ..group.worker import Work
from .buckets import BUCKET
from .gradients import NAME, Synchronised, finish_of, kind_of, overlapping, unlike
from .named import digest, local, parameters, shares_calls, told_by_all
from .staging import number_of_bytes, wrong_bytes

_NAME = "overlap_grads"
_Step = tuple[bool, list[Tensor]]  # whether some rank was ready; the gradients


class _Seen(NamedTuple):
    """A gradient when it was seen.

    Attributes:
        gradient: the object; `module.half()` gives it other memory, and leaves it in its place.
        alias: one of the same memory, whatever becomes of the other.
        times: how often it had been written.
    """

    gradient: Tensor
    alias: Tensor
    times: int

    @classmethod
    def now(cls, gradient: Tensor) -> _Seen:
        return cls(gradient, gradient.detach(), times_written(gradient))

    def is_changed(self) -> bool:
        """Whether it was written, or has other memory."""
        if times_written(self.gradient) > self.times:
            return True
        return _memory_of(self.gradient) != _memory_of(self.alias)


@entry
def overlap_grads(
    module: nn.Module,
    average: bool = True,
    group: object = None,
    *,
    bucket_bytes: int = BUCKET,
    wire_dtype: torch.dtype | None = None,
) -> Overlap:
    """Reduce the gradients of a module while backward runs; `weft.sync_grads` finishes it.

    Collective: call it once for each model, on every rank. A step remains `backward()`, then
    `weft.sync_grads(module)` with the arguments given here. If they differ on some rank, or a
    gradient is replaced or written there after backward has made it (by another backward, by
    clipping, by a hook that comes later), `sync_grads` raises on every rank; but torch does not
    count what `GradScaler.unscale_` writes: call that after `sync_grads`. Sharded tables of the
    module on the CPU, cut over the same group, have connections of their own from here on.

    Args:
        module: the same parameters, by name, dtype and shape, on every rank.
        average: as for `weft.sync_grads`.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        bucket_bytes: a bucket is full when its gradients have at least so many bytes; its last
            gradient may make it larger.
        wire_dtype: as for `weft.sync_grads`.

    Returns:
        An `Overlap`: `remove()` ends it, and within `paused()` backward only accumulates.

    Raises:
        WeftError: modules or arguments differ, or the module is overlapped already; the same text
            on every rank.
        WireError: a peer or a link failed; names the culprit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     model = torch.nn.Linear(2, 1)
        ...     weft.overlap_grads(model, average=False)
        ...     model(torch.full((1, 2), float(group.rank))).sum().backward()
        ...     weft.sync_grads(model, average=False)
        ...     return model.weight.grad.tolist()
        >>> run(3, program)
        [[[3.0, 3.0]], [[3.0, 3.0]], [[3.0, 3.0]]]
    """
    group = default.resolve(group)
    with preparing(group, _NAME):
        synchronised = Synchronised(group, module, average, wire_dtype)
    overlap = Overlap(synchronised)
    overlap.start(module, bucket_bytes)
    return overlap


class Overlap:
    """Reduces the gradients of one module while backward runs; made by `overlap_grads`."""

    _module: weakref.ref[nn.Module]
    _keepers: weakref.WeakSet[nn.Module]  # the modules that keep this alive, by `_kept`

    def __init__(self, synchronised: Synchronised) -> None:
        self._synchronised = synchronised
        self._worker = synchronised.group.worker
        self._paused = False
        self._handles: list[RemovableHandle] = []
        self._is_removed = False
        self._buckets: list[list[str]] = []

    def start(self, module: nn.Module, bucket_bytes: int) -> None:
        """Agree on the order of the parameters, and hook them; collective.

        Raises:
            WeftError, WireError: as `overlap_grads`.
        """
        with preparing(self._synchronised.group, _NAME):
            job = self._ordering(module, bucket_bytes)
        order = self._worker.call(_NAME, job)
        self._module = weakref.ref(module)
        full = number_of_bytes(bucket_bytes)
        size = full
        for name in order:
            if size >= full:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(name)
            size += local(self._synchronised.of[name]).nbytes
            parameter: Any = self._synchronised.of[name]  # the methods below are untyped
            if parameter.requires_grad:
                hook = self._hook(name, len(self._buckets) - 1)
                self._handles.append(parameter.register_hook(self._before(name)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._restart()
        # those with the parameters, too: what is given may be a wrapper, which goes before them
        owners = (part for part in module.modules() if part._parameters)
        self._keepers = weakref.WeakSet([module, *owners])
        for keeper in self._keepers:
            _kept[keeper] = self
        overlapping[self] = None

    def remove(self) -> None:
        """Remove the hooks; `weft.sync_grads` then does all of it. Twice is fine.

        Call it on every rank, best between two steps. Where a backward has run since the last
        `weft.sync_grads`, the next one still completes that step, with the same arguments, unless
        the group has been closed: then nothing is completed.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_removed = True
        if not self._gradients:
            self.leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this context backward only accumulates; the next backward outside is reduced.

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

    def _ordering(self, module: nn.Module, bucket_bytes: object) -> Callable[[], list[str]]:
        """The job that returns the parameters: last first if all modules have the same order, else
        sorted by name."""
        known = self._synchronised
        error = known.error or wrong_bytes("bucket_bytes", bucket_bytes)
        if error is None and finish_of(module) is not None:
            error = (
                "gradients of the module overlap already: remove() that first, and where a "
                "backward has run since, call weft.sync_grads"
            )
        order: list[str] = []
        if error is None:
            names = [name for name, _ in parameters(module)]
            order = [name for name in reversed(names) if name in known.of]
        described = digest({**known.manifest, "their order": ", ".join(order)})
        fields = known.fields | {"bucket_bytes": number_of_bytes(bucket_bytes)}
        own = bytes([error is None and shares_calls(module, known.group)])

        def job() -> list[str]:
            with agreed(known.group, _NAME, fields, error, digest=described, own=own) as said:
                same = said.equal
                (needs_line,) = said.mask(len(own))
            if not same:
                told_by_all(known.group, _NAME, known.manifest)
            if needs_line:  # backward comes to its tables when it does, and buckets have an order
                known.group.add_line()
            return order if same else sorted(order)

        return job

    def _restart(self) -> None:
        self._missing = [set(names) for names in self._buckets]
        # what was there before backward, which is the caller's
        self._callers: dict[str, Tensor | None] = {}
        self._gradients: dict[str, _Seen] = {}  # as backward left them
        self._works: list[Work[_Step]] = []
        self._claims: dict[int, object] = {}  # by bucket: of the thread that starts it
        self._totals: dict[str, Tensor] = {}  # that do not lie where the gradients do
        self._changed: str | None = None  # whose gradient changed after backward had made it
        self._failures: list[WeftError] = []  # the first of a bucket, on every rank

    def _before(self, name: str) -> Any:
        kept = weakref.ref(self)  # C++ holds the hook, and Python would not see the cycle

        @uncompiled
        def coming(_: Tensor) -> None:  # torch.autograd.grad comes, too, and accumulates nothing
            overlap = kept()
            if overlap is not None:
                overlap._callers[name] = overlap._synchronised.of[name].grad

        return coming

    def _hook(self, name: str, bucket: int) -> Any:
        kept = weakref.ref(self)

        @uncompiled
        def seen(parameter: Any) -> None:
            overlap = kept()
            if overlap is None or overlap._paused:
                return
            if not overlap._is_removed:  # torch calls the hooks that were there as it began
                overlap._take(name, bucket, parameter)

        return seen

    def _take(self, name: str, bucket: int, parameter: Any) -> None:
        """Take a gradient that backward has made."""
        if parameter.grad is None:  # a hook of the caller's has used it up
            return
        if bucket < len(self._works):  # said, by all ranks, when all have come to sync_grads
            self._note_change(name)
            return
        if self._callers.get(name) is not parameter.grad and _has_others(parameter.grad):
            parameter.grad = parameter.grad.clone()
        self._gradients[name] = _Seen.now(parameter.grad)
        self._missing[bucket].discard(name)
        self._start_ready()

    def _start_ready(self) -> None:
        """Start the next buckets, as far as all their gradients are there."""
        while (bucket := len(self._works)) < len(self._buckets) and self._is_ready(bucket):
            mine = object()
            if self._claims.setdefault(bucket, mine) is not mine:
                return  # another thread of backward starts it, and then looks again
            places = {self._synchronised.of[name].device for name in self._from(bucket)}
            devices = [place for place in places if place.type != "cpu"] or [torch.device("cpu")]
            if len(devices) > 1:
                return  # `sync_grads` does it: a job follows the stream of one device
            # the job looks at no other gradient: backward may be making it
            given = {name: self._gradients[name].alias for name in self._buckets[bucket]}
            job = Aside(self._synchronised.group.streams, devices[0], self._step(bucket, given))
            self._works.append(self._worker.submit(NAME, job))

    def _is_ready(self, bucket: int) -> bool:
        """Whether all gradients of a bucket are there, each like its parameter.

        A parameter that has other memory for a while is left to `sync_grads`, which refuses it if
        it has that memory still.
        """
        if self._missing[bucket]:
            return False
        of, seen = self._synchronised.of, self._gradients
        return not any(unlike(name, seen[name].alias, of[name]) for name in self._buckets[bucket])

    def _from(self, bucket: int) -> list[str]:
        """The parameters of a bucket and of all later ones."""
        return list(chain.from_iterable(self._buckets[bucket:]))

    def _step(self, bucket: int, given: dict[str, Tensor] | None) -> Callable[[], _Step]:
        names, first = self._from(bucket), len(self._buckets[bucket])
        if bucket == 0:  # all buckets of a step have the same, whenever they are reduced
            self._described = self._synchronised.describe()
        as_of = self._described
        # of this step, also where it is interrupted
        seen, totals, failures = self._gradients, self._totals, self._failures
        wrong = self._what_changed() if given is None else None

        def job() -> _Step:
            if failures:  # no rank reduces the later buckets, nor waits there
                raise failures[0]
            known = self._synchronised
            try:
                went_on = known.reduce(names, first=first, given=given, as_of=as_of, error=wrong)
            except WeftError as error:
                failures.append(error)
                raise
            if given is None:
                found = [known.of[name].grad for name in names[:first]]
            else:
                found = list(given.values())
                _note_sums(given, seen, totals)
            return went_on, [local(each) for each in found if each is not None]

        return job

    def _note_changes(self, names: Iterable[str]) -> None:
        """Note whose gradient is no longer there as it was seen, or has been written since."""
        for name in names:
            seen = self._gradients[name]
            if self._synchronised.of[name].grad is not seen.gradient or seen.is_changed():
                self._note_change(name)

    def _give_totals(self) -> str | None:
        """Make the sums the gradients; the error if a parameter does not take its own."""
        for name, total in self._totals.items():
            try:
                self._synchronised.of[name].grad = total
            except RuntimeError as wrong:  # of torch
                return f"the gradient of {name!r} cannot be its sum: {wrong}"
        return None

    def _note_change(self, name: str) -> None:
        self._changed = self._changed or name

    def _what_changed(self) -> str | None:
        """The error if a gradient changed, or was replaced, after backward had made it."""
        if self._changed is None:
            return None
        return (
            f"the gradient of {self._changed!r} changed after backward had made it, and holds "
            "anything: call weft.sync_grads after each backward, and before anything else, such as "
            "clipping, touches `.grad`; let backwards that only accumulate run in paused(); and "
            "where several checkpoints run one module, pass them use_reentrant=False"
        )

    def _is_replaced(self) -> bool:
        """Whether the module has other parameters than those with hooks."""
        module = self.module()
        if module is None:  # `sync_grads` is called for another, with the same ones
            return False
        there = dict(parameters(module))
        known = self._synchronised
        return len(there) != len(known.manifest) or any(
            there.get(name) is not parameter for name, parameter in known.of.items()
        )

    # what `sync_grads` asks for: see `gradients.Overlapping`

    def is_given_up(self) -> bool:
        return self._is_removed and self._synchronised.group.closed

    def leave(self) -> None:
        overlapping.pop(self, None)
        for keeper in self._keepers:
            if _kept.get(keeper) is self:
                del _kept[keeper]

    def module(self) -> nn.Module | None:
        return self._module()

    def parameters(self) -> Iterable[Tensor]:
        module = self.module()
        return self._synchronised.of.values() if module is None else module.parameters()

    def finish(
        self,
        group: Group,
        average: bool,
        wire_dtype: torch.dtype | None,
        *,
        error: str | None = None,
    ) -> None:
        """`sync_grads` of this module; buckets that began are completed, whatever is wrong."""
        failure: WeftError | None = None
        try:
            known = self._synchronised
            had = known.group, known.average, known.wire_dtype
            if not all(map(operator.is_, had, (group, average, wire_dtype))):
                error = (
                    "sync_grads has another group, average or wire_dtype than overlap_grads had: "
                    "pass the same"
                )
            elif self._is_replaced():
                error = (
                    "the module has other parameters than when overlap_grads was called: remove() "
                    "that and call it again"
                )
            # the others too: which buckets have started may differ from step to step
            later = self._gradients.keys() & self._from(len(self._works))
            begun = self._gradients.keys() - later
            self._note_changes(later)
            for bucket in range(len(self._buckets)):
                try:
                    if bucket < len(self._works):
                        self._works[bucket].wait()
                    elif failure or not self._worker.call(NAME, self._step(bucket, None))[0]:
                        break
                except WeftError as raised:  # on every rank, some of which have begun more buckets
                    failure = failure or raised
            if failure is not None:
                raise failure
            self._note_changes(begun)
            error = error or self._what_changed() or self._give_totals()
            # what went wrong since buckets began; all ranks are in `sync_grads`
            self._worker.call(NAME, lambda: confess(known.group, NAME, None, error))
        finally:
            self._restart()
            if self._is_removed:
                self.leave()


_kept: weakref.WeakKeyDictionary[nn.Module, Overlap] = weakref.WeakKeyDictionary()
"""What overlaps the gradients of each module, and lives as long as one of them."""


def _note_sums(sums: dict[str, Tensor], seen: dict[str, _Seen], totals: dict[str, Tensor]) -> None:
    """Note which sums lie where the gradients lay, and keep the others as totals."""
    for name, total in sums.items():
        before = seen[name]
        if total is before.alias:  # a dense one, which was written once
            seen[name] = before._replace(times=before.times + 1)
        else:  # `sync_grads` makes it the gradient
            totals[name] = total


def _memory_of(gradient: Tensor) -> tuple[object, ...]:
    """Of what kind a gradient is, and where its elements lie."""
    if gradient.layout == torch.sparse_coo:
        parts = [gradient._indices(), gradient._values()]
    else:
        parts = [local(gradient)]
    return kind_of(gradient), [(part.data_ptr(), part.stride()) for part in parts]


def _has_others(gradient: Tensor) -> bool:
    """Whether other tensors may lie in the memory of a dense gradient that autograd made."""
    if gradient.layout != torch.strided:  # a sum of rows is never written where they lie
        return False
    if is_made_of_others(gradient):
        return True
    return has_elements(gradient) and is_held_by_others(gradient)
