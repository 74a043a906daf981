"""Gradients of a DistributedDataParallel model over weft: communication hooks.

`register(ddp_model)` is all that a training loop needs. `weft.sparse_all_reduce` averages sparse
gradients. The group averages dense ones; on an accelerator the group's own all-reduce does. Both
happen while backward is still running. `.grad` then has what DistributedDataParallel itself would
compute. Trainers that take a communication hook and its state get `weft.ddp.hook` and a
`weft.ddp.State`. `TopK` and `topk_hook` send a part of each gradient only.

On an accelerator everything uses the model's own group. NCCL demands that all ranks start the same
collectives of a group in the same order. Buckets come in the same order on all ranks, and the
worker of the group starts their collectives, sparse and dense ones, in that order. The collectives
that DistributedDataParallel itself starts on the group come before the first bucket or, since the
hook of the last bucket waits for the worker, after the last one. Collectives that the model's own
backward starts there would come in between, in no fixed order: `register` refuses a `SyncBatchNorm`
on the same group.

Streams: a bucket is reduced in weft's stream of its device, after the work that is in the stream of
backward when the hook is called. That work has written the gradient: like torch's own hooks, these
take it that one stream writes all gradients of a bucket. No stream waits for a reduction before
backward ends. Then two do, which are mostly the same: that of DistributedDataParallel waits for the
event in the bucket's Future, before it copies gradients to their place; and that of the caller of
`backward()` waits when errors are looked for. The tensors that a reduction reads are kept until
then: their memory belongs to the stream of backward, which may reuse it once it is freed.

`register` also removes a limit of DistributedDataParallel (pytorch#80496): a sparse table that a
batch did not use, on some ranks or on all, gets a gradient without rows.

A backward may run inside another one: reentrant checkpointing calls one for each block. What is
under way belongs to the step, which is DistributedDataParallel's, whichever backward a bucket comes
in. Calls are waited for at the end of the backward that the last bucket comes in, before
DistributedDataParallel waits, and errors are raised at the end of the outermost.
"""
# No postponed annotations here: DistributedDataParallel compares those of the hook with types.

import copy
import dataclasses
import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from . import kernels
from .base._torch import at_end_of_backward, backward_id, has_run, is_of_group, uncompiled
from .base.devices import Aside, Streams, accelerators, on_host
from .base.errors import WeftError, WireError, entry
from .call.agree import preparing
from .call.opening import opened
from .comm.buckets import reduce_dense
from .comm.gradients import without_rows
from .group import process_group
from .group.group import Group
from .group.worker import Work
from .schedules import fast_all_reduce
from .sparse import Record, last_call
from .sparse.api import job_of
from .sparse.request import travelling, wrong_wire_dtype
from .sparsify import Sparsifier

_log = logging.getLogger("weft")

_KEPT = 256  # records
_NAME = "ddp.register"
_END = "ddp end of backward"


_NOT_COPIED = ("_handle", "_group", "_step", "_outermost")  # of a State: what a copy does not have


@dataclasses.dataclass
class _Step:
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
    pending: "list[Work[Any] | Exception]" = dataclasses.field(default_factory=list)
    tables: "_Tables | None" = None
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
        found = [_error_of(work) for work in self.pending]
        return [error for error in found if error is not None]


def _no_backward() -> None:
    """In place of a reference to what a backward keeps: there is none."""


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
                and sparse; None: their own. It must be the same on every rank; weft compares it
                once.
        """
        self._handle = group
        self._group: Group | None = None
        self.algorithm = algorithm
        self._wire_dtype = wire_dtype
        self._error: str | None = None  # what is wrong with the model
        # DistributedDataParallel reduces which parameters were used at the end of each backward
        self._unused = False
        self.calls: deque[Record] = deque(maxlen=_KEPT)
        self._step: _Step | None = None  # that is under way
        # what the outermost backward keeps to raise errors at its end: gone if that was given up
        self._outermost: Callable[[], object] = _no_backward
        self._is_told_of = False  # what the first step carried
        self._unlike: str | None = None  # what is wrong with the kind of a gradient

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
    def group(self) -> Group:
        """The group as weft's. The first access makes it, which is collective.

        Raises:
            WeftError: the ranks' states differ, or one is wrong; the same text on every rank.
        """
        if self._group is None:
            kernels.prepare()
            given = self._handle
            group = given if isinstance(given, Group) else process_group.of_group(given)
            # dense buckets are not compared one by one
            with preparing(group, _NAME):
                fields, error = self._asked()
            _tell(group, fields | {"kind of state": type(self).__name__}, error)
            self._group = group
        return self._group

    def _tell_first(self, step: _Step, sent: int) -> None:
        """Log what weft carries of the model in a step, in which this rank sent so many bytes."""
        _log.info(
            "ddp: %s and %s a step, %.0f KB sent by rank %d in the first",
            _counted(step.sparse, "table"),
            _counted(step.dense, "dense bucket"),
            sent / 1e3,
            self.group.rank,
        )

    def _asked(self) -> tuple[dict[str, str], str | None]:
        """What must be the same on every rank, and what is wrong with it."""
        error = self._error or wrong_wire_dtype(self._wire_dtype)
        return {"wire_dtype": str(self._wire_dtype)}, error

    def _reduction(self, bucket: dist.GradBucket) -> Callable[[Group, Tensor], None]:
        """What reduces a dense bucket, in place, in a call whose turn it is."""

        def reduction(group: Group, gradient: Tensor) -> None:
            if on_host(gradient):
                reduce_dense(group, [gradient], "avg", self.wire_dtype)
                return
            # divided first: a sum may overflow. Aside: what is not reduced stays this rank's own
            sent = gradient.div(group.size).to(travelling(gradient.dtype, self.wire_dtype))
            fast_all_reduce(group.on(gradient.device), sent, "sum").wait()
            gradient.copy_(sent)

        return reduction


class TopK(State):
    """The state of `topk_hook`, which sends the largest entries of gradients; one for each model.

    Each rank adds a parameter's gradient to the parameter's residual, which it keeps. It sends the
    fraction `density` of the entries of this sum, those of the largest magnitude, and keeps the
    others as the new residual (error feedback). `weft.sparse_all_reduce` averages what the ranks
    sent: an entry is the sum of what ranks sent of it, divided by the number of all ranks; an entry
    that no rank sent is zero. Every rank gets the same bits.

    Ranks seldom send the same entries, so with many ranks the result fills up. With `total_density`
    only the largest means are shared, and the others stay in the residuals of who sent them.

    The constructor raises nothing. What is wrong with the settings is raised on every rank at the
    first use, from `backward()` or `weft.sync_sparsified`.

    Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887), sections 3.1 to
    3.3. For `total_density`: Li and Hoefler, "Near-optimal sparse allreduce for distributed deep
    learning" (PPoPP'22), where both densities are one number.

    Attributes:
        calls: records (`weft.sparse.Record`) of the last sparse calls, oldest first, at most 256:
            one for each bucket of dense gradients in a step, and those of tables with sparse
            gradients.
        sparsifier: the settings, and what this rank keeps.

    Example:
        >>> import torch, weft
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> with weft.init():
        ...     model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        ...     state = weft.ddp.TopK(0.25, min_numel=1)
        ...     model.register_comm_hook(state, weft.ddp.topk_hook)
        ...     model(torch.tensor([1.0, 8.0, 2.0, 4.0])).backward()
        ...     model.module.weight.grad, state.state_dict()["residual"]
        (tensor([[0., 8., 0., 0.]]), {'float32 -1': tensor([1., 0., 2., 4.])})
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        total_density: float | None = None,
        error_feedback: bool = True,
        momentum: float = 0.0,
        warmup_steps: int = 0,
        min_numel: int = 8192,
        chunk: int | None = None,
        wire_dtype: torch.dtype | None = None,
        group: Group | dist.ProcessGroup | None = None,
        algorithm: str = "auto",
    ) -> None:
        """All but `group` must be the same on every rank; weft compares it.

        Args:
            density: the fraction of a parameter's entries that a rank sends, above 0. The number of
                entries is rounded up. Entries that are zero are not sent. With 1 the parameter is
                sent whole.
            total_density: None, or the fraction of a parameter's entries that the result has at
                most, above 0; the number is rounded up. The ranks that own the sums share those of
                the largest magnitude; of equal ones, those that come first. An entry leaves a
                rank's residual only if that rank sent it and it is in the result. With both
                densities equal, for k entries, a rank receives less than 6k words if k is large
                enough: docs/compression.md has what was counted. Parameters that are sent whole
                have whole results.
            error_feedback: whether a rank keeps what it does not send. Without it gradients are
                biased, and the loss becomes worse.
            momentum: the factor of momentum correction, from 0, below 1; 0: none. The residual then
                accumulates velocities instead of gradients, and the velocity of an entry that was
                sent becomes zero (factor masking). Use SGD without a momentum of its own. It needs
                `error_feedback`.
            warmup_steps: the number of steps in which the density falls from 0.25 to `density`, by
                the same factor from step to step; 0: none. It changes nothing if `density` is 0.25
                or more. The same is true of `total_density`.
            min_numel: parameters of fewer entries, such as biases and norms, are sent whole.
            chunk: None, or a number of entries: the selection is then made in each run of so many
                consecutive entries of the flattened gradient, the same number in each, as in
                SparseLoCo (arXiv 2508.15706), which has 4096.
            wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: entries of
                wider dtypes are sent in this dtype. The residual keeps the rounding error of what
                this rank sends, but not that of the mean, which is rounded, too.
            group: the model's process group, or a Group; None: torch.distributed's default group.
            algorithm: of `weft.sparse_all_reduce`: "auto" or a registered name. With
                `total_density`, which has a schedule of its own, "auto".
        """
        super().__init__(group, algorithm, wire_dtype)
        self.sparsifier = Sparsifier(
            density,
            total_density,
            error_feedback,
            momentum,
            warmup_steps,
            min_numel,
            chunk,
            wire_dtype,
        )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what this rank keeps from step to step, for a checkpoint. Each rank has its own.

        Returns:
            Three dicts, "residual", "velocity" (with `momentum`) and "steps" (how often a parameter
            was reduced, an int). Their keys name the parameters: by dtype and number, counted from
            the model's last parameter back ("float32 -1"), or as `weft.sync_sparsified` was given
            them. Tensors are 1-D, as long as the flattened gradient, in float32 or, for float64, in
            float64. They are not copies: the next step changes them.
        """
        return self.sparsifier.state_dict()

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Continue from what `state_dict()` returned on this rank, of the same model; copy it.

        Call it before the first backward, with as many ranks as it was saved on.

        Raises:
            WeftError: `state` is not what `state_dict()` returns; raised on this rank alone. Later,
                on every rank, from `backward()`: a residual has not as many entries as its
                parameter.

        Example:
            >>> import torch, weft
            >>> with weft.init():
            ...     state = weft.ddp.TopK(0.5, min_numel=1)
            ...     weft.sync_sparsified({"w": torch.tensor([1.0, 8.0])}, state)
            ...     again = weft.ddp.TopK(0.5, min_numel=1)
            ...     again.load_state_dict(state.state_dict())
            >>> again.state_dict()
            {'residual': {'w': tensor([1., 0.])}, 'velocity': {}, 'steps': {'w': 1}}
        """
        self.sparsifier.load_state_dict(state)

    def _tell_first(self, step: _Step, sent: int) -> None:
        if self.group.rank == 0:
            self.sparsifier.tell_if_whole()
        super()._tell_first(step, sent)

    def _asked(self) -> tuple[dict[str, str], str | None]:
        wrong, (settings, error) = super()._asked()[1], self.sparsifier.settings()
        return settings, wrong or error

    def _reduction(self, bucket: dist.GradBucket) -> Callable[[Group, Tensor], None]:
        parameters = bucket.parameters()
        names = self.sparsifier.names_of(parameters)
        # complex numbers come as two real ones
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]

        def reduction(group: Group, flat: Tensor) -> None:
            parts = dict(zip(names, flat.split_with_sizes(sizes), strict=True))
            error = self.sparsifier.wrong(parts)
            record = self.sparsifier.reduce(group, parts, self.algorithm, error=error)
            if record is not None:
                self.calls.append(record)

        return reduction


@entry
def register(
    ddp_model: nn.Module,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> State:
    """Let weft carry the gradients of a model; call it once for each model, on every rank.

    A copy of the model has no hook, as with torch's own hooks; you may register it, too.

    Args:
        ddp_model: the wrapped model, with any options; weft uses its process group. In a group of
            one it may be unwrapped, as some trainers leave it: `register` then does nothing, and
            logs that once.
        algorithm: of `weft.sparse_all_reduce`: "auto" or a registered name.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: dense and sparse
            gradients of wider floating-point dtypes are sent in this dtype (lossy:
            docs/wire-dtype.md has the error bound, which is that of `weft.sync_grads`). With
            `torch.float32`, sparse gradients of half precision are rounded only in the result.

    Returns:
        The hook's state; `state.calls` has the records of the last calls.

    Raises:
        WeftError: `ddp_model` is not a DistributedDataParallel, and there are several ranks; it has
            a communication hook already; `wire_dtype` is wrong or differs between ranks; a table
            with sparse gradients is the weight of another layer, too; or a `SyncBatchNorm` on an
            accelerator has the same group; the same text on every rank. Later, from `backward()`:
            a parameter's first gradient is sparse, or dense, where DistributedDataParallel expects
            the other; or the errors of the calls. Then `.grad` holds this rank's own values; the
            next step works.
        WireError: from `backward()`: a peer or a link failed.

    Example:
        >>> import torch, weft
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> with weft.init():
        ...     table = torch.nn.EmbeddingBag(1000, 8, sparse=True)
        ...     model = DistributedDataParallel(table)
        ...     state = weft.ddp.register(model)
        ...     model(torch.tensor([[3, 7, 3]])).sum().backward()
        ...     table.weight.grad.coalesce().indices()
        tensor([[3, 7]])
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        if isinstance(ddp_model, nn.Module) and _runs_alone():
            if error := wrong_wire_dtype(wire_dtype):
                raise WeftError(error)
            say_alone()
            return State(None, algorithm, wire_dtype)
        error = (
            f"register takes a DistributedDataParallel model, this is {type(ddp_model).__name__}"
            ": wrap it first"
        )
        if process_group.has_default():  # ranks that have one may be of this group, and would wait
            _tell(process_group.of_group(None), {}, error)
        raise WeftError(error)
    state = State(ddp_model.process_group, algorithm, wire_dtype)
    state._error = _interferes(ddp_model) or _tied(ddp_model)
    state._unused = ddp_model.find_unused_parameters
    group = state.group  # connects here, where all ranks are, and not in the first backward
    _set_hook(group, ddp_model, state)
    if has_run(ddp_model) and group.rank == 0:
        _log.warning(
            "ddp.register: the model has run already, and weft did not carry the gradients of "
            "those steps: call it right after DistributedDataParallel()"
        )
    keep_tables_used(ddp_model.module)
    _check_kinds(state, ddp_model)
    # torch's forward hooks do not see what a forward raises
    ddp_model.forward = _Forward(state, ddp_model)  # type: ignore[method-assign]
    return state


def _set_hook(group: Group, ddp_model: DistributedDataParallel, state: State) -> None:
    """Set weft's hook; collective.

    Raises:
        WeftError: a model has a hook already, on some rank; the same text on every rank.
    """
    error = None
    try:
        ddp_model.register_comm_hook(state, hook)
    except RuntimeError as refused:
        error = f"DistributedDataParallel takes no hook of weft's ({refused})"
        if "only be called once" in str(refused):
            error = (
                "this model has a communication hook already, and DistributedDataParallel takes "
                "one: call weft.ddp.register once for each model, and register no other hook"
            )
    _tell(group, {}, error)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _runs_alone() -> bool:
    """Whether there is no other rank: in the default group or, without one, of what was started."""
    if process_group.has_default() and (world := dist.group.WORLD) is not None:
        return world.size() == 1
    return os.environ.get("WORLD_SIZE", "1") == "1"  # else somebody forgot to make the group


@functools.cache
def say_alone() -> None:
    _log.warning(
        "ddp.register: this program runs alone and the model is not in DistributedDataParallel: "
        "gradients stay as they are"
    )


def _interferes(ddp_model: DistributedDataParallel) -> str | None:
    """What in a model on an accelerator would use the group while gradients do."""
    if on_host(next(ddp_model.parameters())):
        return None
    for name, part in ddp_model.module.named_modules():
        used = getattr(part, "process_group", None) or dist.group.WORLD
        if isinstance(part, nn.SyncBatchNorm) and used is ddp_model.process_group:
            return (
                f"{name or 'the module'} is a SyncBatchNorm, whose backward uses the group while "
                "gradients do: give DistributedDataParallel one of its own, "
                "process_group=torch.distributed.new_group()"
            )
    return None


class _Place(NamedTuple):
    """Where a parameter is: in which module, and by which name in the whole."""

    part: nn.Module
    name: str


def _places(module: nn.Module) -> dict[Tensor, list[_Place]]:
    """The parameters that DistributedDataParallel reduces, each with all its places.

    By the first of these it knows whether it expects sparse gradients.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    found: dict[Tensor, list[_Place]] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(path, recurse=False):
            if parameter.requires_grad and name not in ignored:
                found.setdefault(parameter, []).append(_Place(part, name))
    return found


def _is_table(part: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether gradients of a module are sparse, as DistributedDataParallel knows it."""
    return isinstance(part, nn.Embedding | nn.EmbeddingBag) and bool(part.sparse)


def _tied(ddp_model: DistributedDataParallel) -> str | None:
    """What is wrong with a table that a dense layer has as its weight, too; None if nothing is."""
    for (table, name), *others in _places(ddp_model.module).values():
        dense = [other.name for other in others if _is_dense(other.part)]
        if _is_table(table) and dense:
            return (
                f"{name!r} has sparse gradients and is tied to {dense[0]!r}, whose gradients are "
                f"dense: pass sparse=False to the {type(table).__name__}, or call weft.sync_grads "
                "in place of DistributedDataParallel"
            )
    return None


def _is_dense(part: nn.Module) -> bool:
    """Whether gradients of a module are known to be dense.

    Modules that are not torch's own may look rows up: `_check_kind` sees what they do.
    """
    only_holds = isinstance(part, nn.ParameterList | nn.ParameterDict)
    of_torch = type(part).__module__.startswith("torch.nn.")
    return of_torch and not only_holds and not _is_table(part)


def _check_kinds(state: State, ddp_model: DistributedDataParallel) -> None:
    """See whether first gradients are as DistributedDataParallel expects them: sparse or dense."""
    for parameter, places in _places(ddp_model.module).items():
        _check_kind(state, parameter, places)


def _check_kind(state: State, parameter: Tensor, places: list[_Place]) -> None:
    """See whether a parameter's first gradient is as it is expected.

    If not, DistributedDataParallel would fail without a name, and be of no use any more. So it gets
    what it expects, and the error is raised at the end of backward.
    """
    first, *others = places
    expects_sparse = _is_table(first.part)
    other_use = f"as {others[0].name!r}" if others else "of another use"

    def check(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse == expects_sparse:
            handle.remove()
        elif expects_sparse:
            state._unlike = (
                f"{first.name!r} has sparse gradients in {type(first.part).__name__}, and got a "
                f"dense one, {other_use}: pass sparse=False there, or call weft.sync_grads in "
                "place of DistributedDataParallel"
            )
            parameter.grad = gradient.to_sparse(1)
        else:
            state._unlike = (
                f"{first.name!r} got a sparse gradient, which DistributedDataParallel expects of "
                "torch.nn.Embedding and EmbeddingBag with sparse=True alone: use one of these, or "
                "call weft.sync_grads in place of DistributedDataParallel"
            )
            parameter.grad = gradient.to_dense()

    # before the hook of DistributedDataParallel's; typed by torch as untyped
    handle = parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]


class _Forward:
    """DistributedDataParallel's forward, whose own calls (of buffers) fail without a name.

    The backward that its outputs are reached by is the outermost of the model's: errors are raised
    at its end. A copy of the model has one of its own, for its own weights.
    """

    def __init__(self, state: State, ddp_model: DistributedDataParallel) -> None:
        self.state, self.model = state, weakref.ref(ddp_model)  # which has this object
        functools.update_wrapper(self, type(ddp_model).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        try:
            output = type(model).forward(model, *args, **kwargs)
        except RuntimeError as error:
            group = self.state._group  # a copy has none
            where = "DistributedDataParallel's forward"
            lost = None
            if group is not None and is_of_group(error):
                lost = group.diagnose(where)
            if lost is None:
                raise
            raise lost from None
        _watch_outputs(self.state, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self.state, self.model())


def _tell(group: Group, fields: dict[str, str], error: str | None) -> None:
    """Have all ranks say what they were given; raises, on all, what is wrong with it."""

    def job() -> None:
        with opened(group, _NAME, fields, error):
            return

    group.worker.call(_NAME, job)


def hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """The communication hook: `ddp_model.register_comm_hook(state, hook)`.

    It is for trainers that take a hook and its state; otherwise call `register`. A model with
    tables that a batch may leave unused needs `keep_tables_used(model)` too.

    Raises:
        WeftError, WireError: from `backward()`: as `register`.

    Example:
        >>> import torch, weft
        >>> with weft.init():
        ...     model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        ...     model.register_comm_hook(weft.ddp.State(), weft.ddp.hook)
        ...     model(torch.tensor([1.0, 8.0])).backward()
        ...     model.module.weight.grad
        tensor([[1., 8.]])
    """
    gradient = bucket.buffer()
    backward = backward_id()
    step = _step_of(state, bucket, backward)
    if backward < 0:  # a rank without data, under Join: there is no backward to raise errors in
        future = _future(state, step, bucket)
        if bucket.is_last() and state._unused:
            state.group.worker.submit(_END, functools.partial(_meet, state.group))
        return future
    _watch_for_end(state)
    if bucket.is_last():  # before DistributedDataParallel queues what it does at the end
        at_end_of_backward(functools.partial(_settle, state, step))
    # made here, behind the stream of backward
    own = Aside(
        Streams(),
        gradient.device,
        lambda: gradient.coalesce() if gradient.is_sparse else gradient,
    )
    try:
        future = _future(state, step, bucket)
    except Exception as error:  # raised later, by _raise_error, when that does no harm
        step.pending.append(error)
        if step.tables is not None:  # which are not reduced
            step.tables.ended.set_result(None)
            step.tables = None
        future = Future()
        future.set_result(gradient)
        return future

    def outcome(done: Future[Tensor]) -> Tensor:
        # Whatever happened, DistributedDataParallel gets a tensor: an error that it found here
        # would lose its type and leave the model unusable. A Future with devices looks into that,
        # and can only if it is coalesced.
        try:
            return done.value()
        except Exception:
            return own.run()

    return future.then(outcome)


def topk_hook(state: TopK, bucket: dist.GradBucket) -> Future[Tensor]:
    """The communication hook that sends sparsified gradients; `TopK` has an example.

    Use it as `ddp_model.register_comm_hook(weft.ddp.TopK(density), weft.ddp.topk_hook)`, on every
    rank, before the first backward. Gradients that are sparse tensors are sent whole. A model with
    tables that a batch may leave unused needs `keep_tables_used(model)` too. If a reduction raises
    a `WeftError`, its residuals become what they were before the step, up to rounding.

    Raises:
        WeftError: from `backward()`: settings are wrong or differ between ranks, or a residual that
            was loaded is of another model; the same text on every rank. The next step works, but
            for wrong settings.
        WireError: from `backward()`: a peer or a link failed; names the culprit. The group is lost.
    """
    return hook(state, bucket)


class _Tables:
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


def _step_of(state: State, bucket: dist.GradBucket, backward: int) -> _Step:
    """The step that a bucket belongs to, which begins with its first bucket.

    One that was given up is left, with what it waited for.
    """
    step = state._step
    if step is None or (bucket.index() == 0 and (backward < 0 or backward != step.backward)):
        sent = None if state._group is None else state._group.traffic.bytes
        step = state._step = _Step(backward, sent)
    step.note(bucket)
    return step


def _future(state: State, step: _Step, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce one bucket: what will be the result, or raise.

    Buckets come in the same order on every rank. Tables that come one right after the other wait
    for the next dense bucket, or for the last of all, and are reduced by one call.
    """
    gradient = bucket.buffer()
    dense = gradient.layout != torch.sparse_coo
    if dense or (step.tables is not None and step.tables.device != gradient.device):
        _reduce_tables(state, step)
    if dense:
        work = _reduce_dense(state, gradient, state._reduction(bucket))
        step.pending.append(work)
        future = work.get_future()
    else:
        step.tables = step.tables or _Tables(gradient.device)
        future = step.tables.add(gradient)
        if not step.is_open:
            _reduce_tables(state, step)
    if bucket.is_last() and not on_host(gradient):
        # Behind this hook DistributedDataParallel may begin to reduce which parameters were used,
        # over the same group. So the worker begins all that waits first; no stream is waited for.
        state.group.worker.call("ddp last bucket", lambda: None)
    return future


def _reduce_tables(state: State, step: _Step) -> None:
    """Queue the reduction of the tables that wait."""
    tables = step.tables
    if tables is None:
        return
    work = _start(state, tables)
    step.tables = None
    step.pending.append(work)

    def ended(_: object) -> None:
        tables.work = work
        tables.ended.set_result(None)

    work.get_future().then(ended)


def _start(state: State, tables: _Tables) -> Work[list[Tensor]]:
    group = state.group
    pairs = tables.given  # not the tables, which will have this work: no cycle keeps gradients
    given = [before for _, before in pairs]
    like = state.algorithm, state.wire_dtype

    def job() -> list[Tensor]:
        alone = len(given) == 1
        # in the stream of the Aside around it
        done = job_of(group, given[0] if alone else given, "avg", *like)()
        record = last_call(group)
        if record is not None:
            state.calls.append(record)
        results = [done] if alone else done
        for (gradient, _), result in zip(pairs, results, strict=True):
            # DistributedDataParallel copies what it is given into the gradient, unless it is the
            # gradient: so let that have the memory of the result.
            gradient.data = result
        return results

    return group.worker.submit("ddp sparse bucket", Aside(group.streams, tables.device, job))


def _reduce_dense(
    state: State, gradient: Tensor, reduction: Callable[[Group, Tensor], None]
) -> Work[Tensor]:
    """Queue the reduction of a dense bucket."""
    group = state.group

    def job() -> Tensor:
        reduction(group, gradient)
        return gradient

    return group.worker.submit("ddp dense bucket", Aside(group.streams, gradient.device, job))


def _watch_for_end(state: State) -> None:
    """See to it that errors are raised at the end of the outermost backward.

    A backward may run inside another one, which an error that is raised there would end. The
    graph task of the outermost keeps what is called at its end, and nothing else does.
    """
    if state._outermost() is None and backward_id() >= 0:
        end = functools.partial(_end, state)
        state._outermost = weakref.ref(end)
        at_end_of_backward(end)


@uncompiled
def _watch_outputs(state: State, output: Any) -> None:
    """Notice when a backward of the model begins, which is when it has come to an output."""

    def reached(gradient: Tensor | None) -> None:
        _watch_for_end(state)

    for tensor in _differentiable(output):
        if not tensor.is_leaf:  # a parameter would keep the hook for ever
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]


def _end(state: State) -> None:
    """At the end of the outermost backward: errors come behind all else that was queued for it."""
    state._outermost = _no_backward
    at_end_of_backward(functools.partial(_raise_error, state))


def _settle(state: State, step: _Step) -> None:
    """Wait for the calls of a step, before DistributedDataParallel finishes the gradients.

    Its waits have no deadline, and its own calls, if the group is lost, fail without a name: so
    that is raised here. Any other error comes at the end.
    """
    for error in step.errors():
        if isinstance(error, WireError):
            raise _noted(error)
    if state._unused:
        try:
            state.group.worker.call(_END, functools.partial(_meet, state.group))
        except WireError as error:
            raise _noted(error) from None


def _raise_error(state: State) -> None:
    """Raise the first error of a step that has ended, on this thread and as what it is."""
    step = state._step
    if step is None or step.is_open:  # nothing is reduced, or other backwards follow
        return
    state._step = None
    unlike, state._unlike = state._unlike, None
    if unlike is not None:
        raise WeftError(unlike)
    for error in step.errors():
        raise _noted(error)
    if step.sent is not None and not state._is_told_of:
        state._is_told_of = True
        state._tell_first(step, state.group.traffic.bytes - step.sent)


def _noted(error: Exception) -> Exception:
    """An error, with a note of what it leaves behind."""
    note = "raised in backward(): .grad now holds this rank's own values, so zero_grad() them"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _meet(group: Group) -> None:
    """Wait until DistributedDataParallel reduces on every rank which parameters were used.

    That goes on meanwhile. Who fails before it is named here, and in its place.
    """
    with opened(group, _END, {}, None):
        return


def _error_of(work: Work[Any] | Exception) -> Exception | None:
    """What became of a call, once it has ended."""
    try:
        if isinstance(work, Exception):
            raise work
        work.wait()
    except Exception as error:
        # its frames hold the work, whose Future holds the error: a cycle that would keep the group
        return error.with_traceback(None)
    return None


def keep_tables_used(module: nn.Module) -> RemovableHandle:
    """Let every sparse table take part in every backward, used or not.

    DistributedDataParallel fails when a batch does not use a table with sparse gradients. This
    hooks the module so that its outputs depend on all its tables (`nn.Embedding` and
    `nn.EmbeddingBag` with `sparse=True`), without a copy. An unused table gets a gradient without
    rows; other tensor hooks on it see None. `register` calls this function.

    Example:
        >>> import torch
        >>> tables = torch.nn.ModuleList(torch.nn.Embedding(9, 2, sparse=True) for _ in "ab")
        >>> tables.forward = lambda index: tables[0](index)  # never uses the other one
        >>> handle = keep_tables_used(tables)
        >>> tables(torch.tensor([4])).sum().backward()
        >>> [table.weight.grad._nnz() for table in tables]
        [1, 0]
    """
    lookups = _Lookups()
    for weight, places in _places(module).items():
        if _is_table(places[0].part) and places[0].part.weight is weight:
            lookups.add(weight, [place.part for place in places])
    for weight in lookups.tables:
        # typed by torch as untyped; weakly, since a hook that holds its tensor keeps it for ever
        weight.register_hook(functools.partial(_fill_in, weakref.ref(weight)))  # type: ignore[no-untyped-call]
    module.register_forward_pre_hook(lookups.begin)
    return module.register_forward_hook(lookups.end)


class _Lookups:
    """Which tables a forward looks up in, so that its outputs depend on all the others.

    A table that is looked up inside a block under reentrant checkpointing is not in the graph of
    the outputs: the block's own backward reaches it. Reached from the outputs as well, it would be
    ready twice, which DistributedDataParallel refuses. So would a table of one output that is
    reached from another, where backward is called for each. Both are left as they are.

    Attributes:
        tables: the weights, each once.
        in_graph: the numbers of those that were looked up with gradients, in this forward.
        apart: of those that were looked up without, as inside such a block.
    """

    def __init__(self) -> None:
        self.tables: list[Tensor] = []
        self.in_graph: set[int] = set()
        self.apart: set[int] = set()

    def add(self, weight: Tensor, parts: list[nn.Module]) -> None:
        """Watch a table, and the modules that have it."""
        note = functools.partial(self.note, len(self.tables))
        self.tables.append(weight)
        for part in parts:
            part.register_forward_pre_hook(note)

    def begin(self, module: nn.Module, args: object) -> None:
        """A hook before the forward."""
        self.in_graph.clear()
        self.apart.clear()

    def note(self, number: int, part: nn.Module, args: object) -> None:
        """A hook before a lookup."""
        if torch.is_grad_enabled():
            self.in_graph.add(number)
        else:
            self.apart.add(number)

    def end(self, module: nn.Module, args: object, output: Any) -> Any:
        """A hook behind the forward: the output, depending on the tables too."""
        if not (self.tables and torch.is_grad_enabled()):
            return None
        outputs = _differentiable(output)
        left_alone = self.apart - self.in_graph
        reached = _reached_from(outputs) if len(outputs) > 1 else set()
        others = [
            table
            for number, table in enumerate(self.tables)
            if number not in left_alone and id(table) not in reached
        ]
        depend: Callable[..., Tensor] = _Depend.apply
        return _mapped(output, lambda tensor: depend(tensor, *others)) if others else None


def _differentiable(output: Any) -> list[Tensor]:
    """The tensors of a module's output that a backward may begin at."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(output, note)
    return found


@uncompiled
def _reached_from(outputs: list[Tensor]) -> set[int]:
    """The ids of the leaves whose gradients backward accumulates from these."""
    nodes = [tensor.grad_fn for tensor in outputs]
    seen: set[Any] = set()
    leaves: set[int] = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            leaves.add(id(node.variable))
        nodes += [before for before, _ in node.next_functions]
    return leaves


def _fill_in(table: weakref.ref[Tensor], gradient: Tensor | None) -> None:
    """Runs before a gradient is accumulated: where there is none, let there be an empty one."""
    weight = table()
    if gradient is None and weight is not None and weight.grad is None:
        weight.grad = without_rows(weight)


class _Depend(torch.autograd.Function):
    """The first argument as it is; in backward the others are reached, without a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *tables: Tensor) -> Tensor:
        ctx.tables = len(tables)
        return tensor.detach()  # not a view, so that it may be modified in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (*gradients, *[None] * ctx.tables)


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with its differentiable tensors changed; containers are copied."""
    if isinstance(output, Tensor):
        return change(output) if output.requires_grad else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_mapped(part, change) for part in output))
    if type(output) in (list, tuple):
        return type(output)(_mapped(part, change) for part in output)
    if isinstance(output, MutableMapping):
        copied = copy.copy(output)
        for key, part in output.items():
            copied[key] = _mapped(part, change)
        return copied
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        twin = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(twin, field.name, _mapped(getattr(output, field.name), change))
        return twin
    return output
