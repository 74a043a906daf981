"""register: a model's hook is set, and its forward watched."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..base._torch import has_run, is_of_group
from ..base.errors import WeftError, check, entry
from ..call.attempt import preparing
from ..comm.named import shares_calls
from ..group import process_group
from ..group.group import Group
from ..rendezvous.world import has_default
from ..sparse.request import wrong_wire_dtype
from .backward import hook, watch_outputs
from .parameters import check_kinds, interferes, tied
from .state import NAME, State, tell_of
from .unused import UnusedTables

_log = logging.getLogger("weft")


@entry
def register(
    ddp_model: nn.Module,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> State:
    """Let weft carry the gradients of a model; call it once for each model, on every rank.

    A copy of the model has no hook, as with torch's own hooks; you may register it, too (with
    `static_graph` torch itself leaves the first step of a copy unreduced). Sharded tables of the
    CPU, cut over the same group, have connections of their own from here on.

    Args:
        ddp_model: the wrapped model, with any options; weft uses its process group. In a group of
            one it may be unwrapped, as some trainers leave it: `register` then does nothing, and
            logs that once.
        algorithm: of `weft.sparse_all_reduce`: "auto" or a name.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: dense and sparse
            gradients of wider floating-point dtypes are sent in this dtype (lossy:
            docs/wire-dtype.md has the error bound, which is that of `weft.sync_grads`), but for
            complex ones. With `torch.float32`, sparse gradients of half precision are rounded only
            in the result.

    Returns:
        The hook's state; `state.calls` has the records of the last calls.

    Raises:
        WeftError: `ddp_model` is not a DistributedDataParallel, and there are several ranks; it has
            a communication hook already; `wire_dtype` is wrong or differs between ranks; a table
            with sparse gradients is the weight of another layer, too; the same text on every rank.
            Later, from `backward()`: a gradient is sparse, or dense, where DistributedDataParallel
            expects the other (of a dense parameter in the first backward of a static graph perhaps
            on its rank alone); or the errors of the calls. Then `.grad` holds this rank's own
            values; the next step works.
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
            check(wrong_wire_dtype(wire_dtype))
            say_alone()
            return State(None, algorithm, wire_dtype)
        error = (
            f"register takes a DistributedDataParallel model, this is {type(ddp_model).__name__}"
            ": wrap it first"
        )
        if has_default():  # ranks that have one may be of this group, and would wait
            with preparing(process_group.of_group(None), NAME):
                raise WeftError(error)
        raise WeftError(error)
    state = State(ddp_model.process_group, algorithm, wire_dtype)
    state.error = interferes(ddp_model) or tied(ddp_model)
    state.finds_unused = ddp_model.find_unused_parameters
    group = state.group  # connects here, where all ranks are, and not in the first backward
    needs_line = _set_hook(group, ddp_model, state)
    if has_run(ddp_model) and group.rank == 0:
        _log.warning(
            "ddp.register: the model has run already, and weft did not carry the gradients of "
            "those steps: call it right after DistributedDataParallel()"
        )
    check_kinds(state, ddp_model)
    # torch's forward hooks do not see what a forward raises
    ddp_model.forward = _Forward.of(state, ddp_model)  # type: ignore[method-assign]
    if needs_line:  # backward comes to its tables when it does, and buckets have an order
        group.worker.call(NAME, group.add_line)
    return state


def _set_hook(group: Group, ddp_model: DistributedDataParallel, state: State) -> bool:
    """Set weft's hook; whether some rank's sharded tables need a line of calls; collective.

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
    with preparing(group, NAME):
        check(error)
        own = bytes([shares_calls(ddp_model.module, group)])
    (needs_line,) = tell_of(group, {}, own)
    return bool(needs_line)


def _runs_alone() -> bool:
    """Whether there is no other rank: in the default group or, without one, of what was started."""
    if has_default() and (world := dist.group.WORLD) is not None:
        return world.size() == 1
    return os.environ.get("WORLD_SIZE", "1") == "1"  # else somebody forgot to make the group


@functools.cache
def say_alone() -> None:
    _log.warning(
        "ddp.register: this program runs alone and the model is not in DistributedDataParallel: "
        "gradients stay as they are"
    )


class _Forward:
    """DistributedDataParallel's forward, whose own calls (of buffers) fail without a name.

    That is the one that somebody set on the model, if there is one, and else its class's. The
    backward that its outputs are reached by is the outermost of the model's: errors are raised
    at its end. A copy of the model has one of its own, for its own weights.
    """

    def __init__(
        self,
        state: State,
        unused: UnusedTables,
        ddp_model: DistributedDataParallel,
        given: Callable[..., Any] | None,
    ) -> None:
        # first: it also copies the attributes of what it wraps
        functools.update_wrapper(self, given or type(ddp_model).forward)
        self.state = state
        self.unused = unused
        self.model = weakref.ref(ddp_model)  # which has this object
        self.given = given  # that of the model itself; None: its class's

    @classmethod
    def of(cls, state: State, ddp_model: DistributedDataParallel) -> _Forward:
        given = vars(ddp_model).get("forward")
        if isinstance(given, _Forward):  # of a model that this one is a copy of
            given = given.given
        return cls(state, UnusedTables.of(ddp_model), ddp_model, given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        try:
            if self.given is None:
                output = type(model).forward(model, *args, **kwargs)
            else:
                output = self.given(*args, **kwargs)
        except RuntimeError as error:
            group = self.state.joined  # a copy has none
            where = "DistributedDataParallel's forward"
            lost = None
            if group is not None and is_of_group(error):
                lost = group.diagnose(where)
            if lost is None:
                raise
            raise lost from None
        self.unused.watch(model, args, output)  # whose end comes before that of errors
        watch_outputs(self.state, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self.state, self.unused, self.model(), self.given)
