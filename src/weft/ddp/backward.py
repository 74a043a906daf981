"""What happens in backward: the communication hook, and the errors of what it began.

What carries a bucket is asked in its call, on weft's own thread: for tensors of an accelerator that
is a process group of weft's own. Its collectives come in the order of the buckets, which is the
same on all ranks, and do not mix with those that DistributedDataParallel, or a layer such as
SyncBatchNorm, starts on the model's group.

Streams: a bucket is reduced in weft's stream of its device, after the work that is in the stream of
backward when the hook is called. That work has written the gradient: like torch's own hooks, these
take it that one stream writes all gradients of a bucket. No stream waits for a reduction before
backward ends. Then two do, which are mostly the same: that of DistributedDataParallel waits for the
event in the bucket's Future, before it copies gradients to their place; and that of the caller of
`backward()` waits when errors are looked for. The tensors that a reduction reads are kept until
then: their memory belongs to the stream of backward, which may reuse it once it is freed.

A backward may run inside another one: reentrant checkpointing calls one for each block. What is
under way belongs to the step, which is DistributedDataParallel's, whichever backward a bucket comes
in. Calls are waited for at the end of the backward that the last bucket comes in, before
DistributedDataParallel waits, and errors are raised at the end of the outermost.
"""
# No postponed annotations here: DistributedDataParallel compares those of the hook with types.

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..base._torch import at_end_of_backward, backward_id, uncompiled
from ..base.devices import Aside, Streams
from ..base.errors import WeftError, WireError, check
from ..call.attempt import in_own_stream, preparing
from ..call.opening import opened
from ..group.group import Group
from ..group.worker import Work
from ..sparse.api import job_of
from .state import State
from .step import Step, Tables
from .unused import differentiable

_END = "ddp end of backward"
_TABLES = "ddp sparse bucket"


def hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """The communication hook: `ddp_model.register_comm_hook(state, hook)`.

    It is for trainers that take a hook and its state; otherwise call `register`. A model with
    tables that a batch may leave unused needs `keep_tables_used(model)` too.

    Raises:
        WeftError, WireError: from `backward()`: as `register`.

    Example:
        >>> import torch, weft
        >>> from torch.nn.parallel import DistributedDataParallel
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
        if bucket.is_last():
            state.group.worker.submit(_END, functools.partial(_meet, state))
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
            return cast(Tensor, own.run())

    return future.then(outcome)


def _step_of(state: State, bucket: dist.GradBucket, backward: int) -> Step:
    """The step that a bucket belongs to, which begins with its first bucket.

    One that was given up is left, with what it waited for.
    """
    step = state.step
    if step is None or (bucket.index() == 0 and (backward < 0 or backward != step.backward)):
        sent = None if state.joined is None else state.joined.traffic.bytes
        step = state.step = Step(backward, sent)
    step.note(bucket)
    return step


def _future(state: State, step: Step, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce one bucket: what will be the result, or raise.

    Buckets come in the same order on every rank. Tables that come one right after the other wait
    for the next dense bucket, or for the last of all, and are reduced by one call.
    """
    gradient = bucket.buffer()
    dense = gradient.layout != torch.sparse_coo
    if dense or (step.tables is not None and step.tables.device != gradient.device):
        _reduce_tables(state, step)
    if dense:
        work = _reduce_dense(state, gradient, state.reduction(bucket))
        step.pending.append(work)
        future = work.get_future()
    else:
        step.tables = step.tables or Tables(gradient.device)
        future = step.tables.add(gradient)
        if not step.is_open:
            _reduce_tables(state, step)
    return future


def _reduce_tables(state: State, step: Step) -> None:
    """Queue the reduction of the tables that wait."""
    tables = step.tables
    if tables is None:
        return
    work = _start(state, tables)
    step.pending.append(work)

    def ended(_: object) -> None:
        tables.work = work
        tables.ended.set_result(None)

    work.get_future().then(ended)
    step.tables = None


def _start(state: State, tables: Tables) -> Work[list[Tensor]]:
    group = state.group
    pairs = tables.given  # not the tables, which will have this work: no cycle keeps gradients
    given = [before for _, before in pairs]
    like = state.algorithm, state.wire_dtype
    error, state.unlike = state.unlike, None

    def job() -> list[Tensor]:
        alone = len(given) == 1
        with preparing(group, _TABLES):
            check(error)
            reduction, _ = job_of(group, given[0] if alone else given, "avg", *like)
        done = reduction()
        state.note_call(group)
        results = [done] if alone else done
        for (gradient, _), result in zip(pairs, results, strict=True):
            # DistributedDataParallel copies what it is given into the gradient, unless it is the
            # gradient: so let that have the memory of the result.
            gradient.data = result
        return results

    return group.worker.submit(_TABLES, in_own_stream(group, tables.device, job))


def _reduce_dense(
    state: State, gradient: Tensor, reduction: Callable[[Group, Tensor], None]
) -> Work[Tensor]:
    """Queue the reduction of a dense bucket."""
    group = state.group

    def job() -> Tensor:
        reduction(group, gradient)
        return gradient

    return group.worker.submit("ddp dense bucket", in_own_stream(group, gradient.device, job))


def _watch_for_end(state: State) -> None:
    """See to it that errors are raised at the end of the outermost backward."""
    state.outermost.at_end(functools.partial(_end, state))


@uncompiled
def watch_outputs(state: State, output: Any) -> None:
    """Notice when a backward of the model begins, which is when it has come to an output."""

    def reached(gradient: Tensor | None) -> None:
        _watch_for_end(state)

    for tensor in differentiable(output):
        if not tensor.is_leaf:  # a parameter would keep the hook for ever
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]


def _end(state: State) -> None:
    """At the end of the outermost backward: errors come behind all else that was queued for it."""
    at_end_of_backward(functools.partial(_raise_error, state))


def _settle(state: State, step: Step) -> None:
    """Wait for the calls of a step, before DistributedDataParallel finishes the gradients.

    Its waits have no deadline, and its own calls, if the group is lost, fail without a name: so
    that is raised here. Any other error comes at the end.
    """
    lost = [error for error in step.errors() if isinstance(error, WireError)]
    if not lost and state.meets:
        try:
            state.group.worker.call(_END, functools.partial(_meet, state))
        except WeftError as error:  # DistributedDataParallel has yet to finish
            step.pending.append(error)
        except WireError as error:
            lost.append(error)
    if lost:
        # its calls hold frames of who trains the model, whose reducer holds `state`, in C++
        state.step = None
        raise _noted(lost[0]) from None


def _raise_error(state: State) -> None:
    """Raise the first error of a step that has ended, on this thread and as what it is."""
    step = state.step
    if step is None or step.is_open:  # nothing is reduced, or other backwards follow
        return
    state.step = None
    unlike, state.unlike = state.unlike, None
    for error in step.errors():
        raise _noted(error)
    if unlike is not None:  # in the first backward of a static graph, which has no last bucket
        raise WeftError(f"rank {state.group.rank}: {unlike}")
    if step.sent is not None and not state.is_told_of:
        state.is_told_of = True
        state.tell_first(step, state.group.traffic.bytes - step.sent)


def _noted(error: Exception) -> Exception:
    """An error, with a note of what it leaves behind."""
    note = "raised in backward(): .grad now holds this rank's own values, so zero_grad() them"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _meet(state: State) -> None:
    """Tell all ranks of a gradient of the wrong kind, where they meet.

    With unused parameters, wait until DistributedDataParallel reduces on every rank which were
    used. That goes on meanwhile. Who fails before it is named here, and in its place.
    """
    if not state.meets:  # of a rank without data, which has begun this ahead
        return
    error, state.unlike = state.unlike, None
    with preparing(state.group, _END):
        check(error)
    opened(state.group, _END, {})
    state.is_checked = True
