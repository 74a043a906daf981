"""Checkpoints of a model with sharded tables, and of what optimizers keep of it.

The state of a table's weight is a DTensor already. What an optimizer keeps of it, such as the sums
of Adagrad, is a plain tensor of this rank's rows, of which torch.distributed.checkpoint would save
one rank's. Here it becomes a DTensor, too, and a plain tensor again when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeftError
from .tables import ShardedTable

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def sharded_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """The state of a model with sharded tables and of its optimizers, for a checkpoint.

    Give it to `torch.distributed.checkpoint.save`, on every rank. To load a checkpoint, also on
    another number of ranks: make the state of the new model and optimizers, have
    `torch.distributed.checkpoint.load` fill it, and give it to `load_sharded_state`. Nothing is
    sent, and the optimizers stay as they are.

    Args:
        model: with any wrapper. It may have no sharded table.
        optimizers: one, or several (SparseAdam takes no dense parameters). Those that have made no
            step yet have the state of which all is zero.

    Returns:
        `{"model": ..., "optimizer": ...}`: what torch's `get_model_state_dict` and
        `get_optimizer_state_dict` return, by the names of the parameters. Tensors that have a row
        for each row of a shard are DTensors `[num_embeddings, ...]` with `Shard(0)`, and share the
        memory of the optimizer's; where torch.distributed has no such group (a program that runs
        alone), they are the plain tensors. A momentum that is sparse becomes dense here, and so
        takes the memory of a shard.

    Raises:
        WeftError: `model` or `optimizers` is something else; raised on this rank alone.

    Example:
        >>> import torch, weft
        >>> with weft.init():
        ...     table = weft.nn.ShardedEmbedding(1000, 8)
        ...     optimizer = torch.optim.Adagrad(table.parameters())
        ...     state = weft.nn.sharded_state(table, optimizer)
        ...     state["optimizer"]["state"]["weight"]["sum"].shape
        torch.Size([1000, 8])
    """
    from torch.distributed.checkpoint import state_dict as states  # which takes long to import

    some = _checked(model, optimizers)
    tables = _tables(model)
    with _begun(model, some):
        kept: Any = states.get_optimizer_state_dict(model, some)
        named = list(_named(kept, some))
    for name, weight in named:
        if name in kept["state"]:
            own = kept["state"][name]  # the optimizer's own dict, which stays as it is
            table = tables.get(weight)
            kept["state"][name] = {key: _whole(table, weight, own[key]) for key in own}
    return {"model": states.get_model_state_dict(model), "optimizer": kept}


def load_sharded_state(model: nn.Module, optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Put a state that `sharded_state` made, and a checkpoint filled, into a model and optimizers.

    Nothing is sent. State of a model whose tables were whole serves, too: each rank takes its rows.

    Args:
        model, optimizers: as for `sharded_state`; the optimizers may be new.
        state: what `sharded_state` returned; `torch.distributed.checkpoint.load` fills it in place.
            The optimizers use its tensors from here on.

    Raises:
        WeftError: `model`, `optimizers` or `state` is something else, or `state` lacks a parameter
            of which an optimizer keeps something; raised on this rank alone. Nothing is changed.
        RuntimeError: from torch, where the weights do not fit the model.

    Example:
        Between the two lines that follow, a program calls `torch.distributed.checkpoint.load`:

        >>> import torch, weft
        >>> with weft.init():
        ...     table = weft.nn.ShardedEmbedding(1000, 8)
        ...     optimizer = torch.optim.SparseAdam(table.parameters())
        ...     state = weft.nn.sharded_state(table, optimizer)
        ...     weft.nn.load_sharded_state(table, optimizer, state)
        >>> optimizer.state[table.weight]["exp_avg"].shape
        torch.Size([1000, 8])
    """
    from torch.distributed.checkpoint import state_dict as states

    some = _checked(model, optimizers)
    if not isinstance(state, dict) or not {"model", "optimizer"} <= state.keys():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise WeftError(
            f"state has {found}: pass what sharded_state returned, with 'model' and 'optimizer'"
        )
    tables = _tables(model)
    given = state["optimizer"]
    with _begun(model, some):
        _check_names(given, some)
        # what is sparse in an optimizer is dense in a checkpoint
        sparse = {
            (weight, key)
            for optimizer in some
            for weight, kept in optimizer.state.items()
            for key, each in kept.items()
            if isinstance(each, Tensor) and each.is_sparse
        }
        states.set_model_state_dict(model, state["model"])
        options = states.StateDictOptions(strict=False)  # `_check_names` is strict
        states.set_optimizer_state_dict(model, some, given, options=options)
        loaded = [(optimizer, dict(optimizer.state)) for optimizer in some]
    for optimizer, kept_of in loaded:
        optimizer.state.update(kept_of)
        for weight, kept in kept_of.items():
            for key, each in kept.items():
                own = _own(tables[weight], each) if weight in tables else each
                kept[key] = own.to_sparse(1) if (weight, key) in sparse else own


def _checked(model: object, optimizers: object) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises WeftError if the arguments are something else."""
    if not isinstance(model, nn.Module):
        raise WeftError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    some: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in some:
        if not isinstance(each, torch.optim.Optimizer):
            raise WeftError(
                f"optimizers has a {type(each).__name__}: pass a torch.optim.Optimizer, or several"
            )
    return some


def _tables(model: nn.Module) -> dict[Tensor, ShardedTable]:
    """The sharded tables of a model, by their weights."""
    return {part.weight: part for part in model.modules() if isinstance(part, ShardedTable)}


def _with_sparse_gradients(model: nn.Module) -> set[Tensor]:
    """The weights of a model whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag, ShardedTable)
    return {part.weight for part in model.modules() if isinstance(part, kinds) and part.sparse}


@contextmanager
def _begun(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, optimizers that have made no step yet have state of which all is zero.

    torch.distributed.checkpoint makes it with dense gradients, which SparseAdam refuses, and which
    take the memory of a shard. It makes none where there are gradients: so all have one inside.
    """
    sparse = _with_sparse_gradients(model)
    fresh = [each for each in optimizers if not each.state]
    groups = [group for each in optimizers for group in each.param_groups]
    parameters = [each for group in groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    try:
        for parameter in parameters:
            parameter.grad = _no_gradient(parameter, parameter in sparse)
        with _at_rate_zero(groups):
            for optimizer in fresh:
                optimizer.step()
        for optimizer in fresh:
            for kept in optimizer.state.values():
                if "step" in kept:
                    kept["step"] = 0 * kept["step"]  # a number, or a tensor
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in fresh:
            optimizer.state.clear()


@contextmanager
def _at_rate_zero(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, a step of an optimizer changes no parameter, whatever decays."""
    rates = [group.get("lr") for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        if rate is not None:
            group["lr"] = 0 * rate  # a number, or a tensor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _no_gradient(parameter: Tensor, is_sparse: bool) -> Tensor | None:
    """A gradient that is zero."""
    if not parameter.requires_grad:
        return None
    if is_sparse:
        return torch.zeros_like(parameter, layout=torch.sparse_coo)
    return torch.zeros_like(parameter)


def _named(kept: Any, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of optimizers, each with its name in a state of torch's."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for named, group in zip(kept["param_groups"], groups, strict=True):
        yield from zip(named["params"], group["params"], strict=True)


def _check_names(given: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise WeftError where a state lacks what an optimizer keeps."""
    kept = {weight for each in optimizers for weight in each.state}
    try:
        lacking = [
            name
            for name, weight in _named(given, optimizers)
            if weight in kept and name not in given["state"]
        ]
    except (KeyError, TypeError, ValueError):
        raise WeftError(
            "state['optimizer'] is not of these optimizers: their groups of parameters differ"
        ) from None
    if lacking:
        raise WeftError(
            f"state['optimizer'] has nothing of {lacking[0]!r}, of which an optimizer keeps "
            "something: load the checkpoint into what sharded_state returns for these optimizers"
        )


def _whole(table: ShardedTable | None, weight: Tensor, kept: Any) -> Any:
    """What an optimizer keeps of a parameter, as a checkpoint has it: dense; of a shard a DTensor.

    Args:
        table: whose shard the parameter is, or None.
        weight: the parameter.
        kept: one thing of those that are kept.
    """
    if not isinstance(kept, Tensor):
        return kept
    dense = kept.to_dense() if kept.is_sparse else kept
    if table is None or kept.shape[:1] != weight.shape[:1]:
        return dense
    return table.as_dtensor(dense)


def _own(table: ShardedTable, given: Any) -> Any:
    """This rank's rows of what a state has of a table: of a DTensor, or of a whole one."""
    if hasattr(given, "to_local"):
        return given.to_local()
    if isinstance(given, Tensor) and given.shape[:1] == (table.num_embeddings,):
        return given[table.first :][: len(table.weight)].clone()
    return given
