"""Checkpoints of a model with sharded tables, and of what optimizers keep of it.

The state of a table's weight is a DTensor already. What an optimizer keeps of it, such as the sums
of Adagrad, is a plain tensor of this rank's rows, of which torch.distributed.checkpoint would save
one rank's. Here it becomes a DTensor, too, and a plain tensor again when it is loaded.

torch.distributed.checkpoint fills what it is given, and raises where the checkpoint lacks a part of
that. So a state always has all that an optimizer may keep: of a parameter of which nothing is kept
yet (it is new, or frozen) it has what the optimizer would begin with. The list of the parameters'
names, which comes from the checkpoint as it was saved, has the names of these twice: loaded,
nothing is kept of them, as before.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ...base.arguments import shown
from ...base.errors import WeftError
from ...comm.named import shards_among, shards_by_name
from .tables import ShardedTable, own_rows, put_shard, take_rows

_WITHOUT_STATE = {"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Settings by which no optimizer keeps more or less: rates, and how a step is computed."""

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def sharded_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """The state of a model with sharded tables and of its optimizers, for a checkpoint.

    Give it to `torch.distributed.checkpoint.save`, on every rank. To load a checkpoint, also on
    another number of ranks: make the state of the new model and optimizers, have
    `torch.distributed.checkpoint.load` fill it, and give it to `load_sharded_state`. Nothing is
    sent, and the optimizers stay as they are.

    Args:
        model: with any wrapper. It may have no sharded table.
        optimizers: one, or several (SparseAdam takes no dense parameters), or none, an empty list.
            They may have made no step yet, or none of some of their parameters, and parameters may
            be frozen.

    Returns:
        `{"model": ..., "optimizer": ...}`: what torch's `get_model_state_dict` and
        `get_optimizer_state_dict` return, by the names of the parameters. Tensors that have a row
        for each row of a shard are DTensors `[num_embeddings, ...]` with `Shard(0)`, and share the
        memory of the optimizer's; where torch.distributed has no such group (a program that runs
        alone), they are the plain tensors. A momentum that is sparse becomes dense here, and so
        takes the memory of a shard. Of parameters of which an optimizer keeps nothing yet there is
        what it begins with, also of frozen ones: leave those out of an optimizer that will never
        train them, if memory is short. Without optimizers their part is empty, so the state may be
        filled from any checkpoint of the model.

    Raises:
        WeftError: `model` or `optimizers` is something else, an optimizer trains what the model
            has not or another one trains, too, it cannot begin with a gradient that is zero
            (LBFGS), it keeps of a shard what has no row for each of its rows, or a shard has other
            rows than this rank's; raised on this rank alone.

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
    found = _optimizer_state(model, some, tables) if some else {}  # torch refuses to give none
    with _under_all_names(model, tables):
        return {"model": states.get_model_state_dict(model), "optimizer": found}


def _optimizer_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tables: dict[Tensor, ShardedTable]
) -> Any:
    """The state of optimizers for a checkpoint, with DTensors of what they keep of shards."""
    from torch.distributed.checkpoint import state_dict as states

    with _state_of_all(model, optimizers) as begun:
        found: Any = states.get_optimizer_state_dict(model, optimizers)
    kept = {}
    for group, weights in _groups(found, optimizers):
        for name, weight in weights.items():
            if own := found["state"].get(name):
                kept[name] = {key: _whole(tables.get(weight), weight, own[key]) for key in own}
        group["params"] += [name for name, weight in weights.items() if weight in begun]
    found["state"] = kept
    return found


def load_sharded_state(model: nn.Module, optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Put a state that `sharded_state` made, and a checkpoint filled, into a model and optimizers.

    Nothing is sent. State of a model whose tables were whole serves, too: each rank takes its rows.

    Args:
        model, optimizers: as for `sharded_state`; the optimizers may be new. Without optimizers
            the model's part is loaded, and theirs is left alone.
        state: what `sharded_state` returned; `torch.distributed.checkpoint.load` fills it in place.
            The optimizers use its tensors from here on.

    Raises:
        WeftError: as for `sharded_state`; or `state` is something else, or lacks a parameter that
            an optimizer trains and keeps something of, or what it keeps with the settings that the
            state has (a momentum that the optimizer was made without; not found where a step needs
            more than gradients); raised on this rank alone. Nothing is changed.
        RuntimeError: from torch, where the weights do not fit the model.

    Example:
        Between the two lines that follow, a program calls `torch.distributed.checkpoint.load`:

        >>> import torch, weft
        >>> with weft.init():
        ...     table = weft.nn.ShardedEmbedding(1000, 8)
        ...     optimizer = torch.optim.Adagrad(table.parameters())
        ...     state = weft.nn.sharded_state(table, optimizer)
        ...     weft.nn.load_sharded_state(table, optimizer, state)
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([1000, 8])
    """
    from torch.distributed.checkpoint import state_dict as states

    some = _checked(model, optimizers)
    wanted = {"model", "optimizer"} if some else {"model"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise WeftError(
            f"state has {found}: pass what sharded_state returned, with 'model' and 'optimizer'"
        )
    tables = _tables(model)
    if not some:
        _load_model(model, tables, state["model"])
        return
    given = state["optimizer"]
    if given and isinstance(given, dict):
        given = {"state": {}, **given}  # which some files lack where nothing is kept
    frozen = {weight for _, _, weight in _members(some) if not weight.requires_grad}
    with _state_of_all(model, some):
        own: Any = states.get_optimizer_state_dict(model, some)
        weights = {name: each for _, named in _groups(own, some) for name, each in named.items()}
        _check_names(given, own, {name for name, each in weights.items() if each in frozen})
        begun = {weights[name] for name in _names_of_begun(given)}
        _check_settings(given, model, some, weights, begun | frozen)
        sparse = _sparse_states(some)  # which are dense in a checkpoint
        _load_model(model, tables, state["model"])
        options = states.StateDictOptions(strict=False)  # `_check_names` is strict
        settings = [[dict(group) for group in optimizer.param_groups] for optimizer in some]
        states.set_optimizer_state_dict(model, some, given, options=options)
        for optimizer, own_settings in zip(some, settings, strict=True):
            for group, own_ones in zip(optimizer.param_groups, own_settings, strict=True):
                # torch (pytorch#143828) takes away those of a group that has no parameters
                group.update({name: own_ones[name] for name in own_ones.keys() - group.keys()})
        loaded = [optimizer.state for optimizer in some]  # leaving the block puts back the old ones
    for optimizer, kept_of in zip(some, loaded, strict=True):
        optimizer.state = kept_of
        for weight in begun & kept_of.keys():
            del kept_of[weight]
        for weight, kept in kept_of.items():
            for key, each in kept.items():
                rows = each
                if weight in tables and isinstance(each, Tensor):
                    rows = own_rows(tables[weight], each)
                kept[key] = rows.to_sparse(1) if (weight, key) in sparse else rows


def _load_model(model: nn.Module, tables: dict[Tensor, ShardedTable], weights: Any) -> None:
    """Put the model's part of a state into a model with these tables."""
    from torch.distributed.checkpoint import state_dict as states

    with _under_all_names(model, tables):
        states.set_model_state_dict(model, weights)


def _checked(model: object, optimizers: object) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises WeftError if the arguments are something else."""
    from torch.distributed.fsdp import FSDPModule  # which takes long to import

    if not isinstance(model, nn.Module):
        raise WeftError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    given: list[Any] = [optimizers]
    if isinstance(optimizers, Iterable) and not isinstance(optimizers, torch.optim.Optimizer):
        given = list(optimizers)
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            raise WeftError(
                f"optimizers has a {type(each).__name__}: pass a torch.optim.Optimizer, or several"
            )
    some = list({id(own): own for own in map(_innermost, given)}.values())
    for part in model.modules():
        if isinstance(part, FSDPModule):  # which may hold gathered parameters, not the optimizer's
            part.reshard()
    _check_parameters(model, some)
    return some


def _check_parameters(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise WeftError where a state, which goes by the model's names, has no place for something.

    That is what an optimizer keeps of something else than the model's parameters, or what is kept
    of a parameter twice.
    """
    names: dict[Tensor, str] = {each: name for name, each in model.named_parameters()}
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        trained: set[Tensor] = set()
        for each in (each for group in optimizer.param_groups for each in group["params"]):
            if each not in names:
                raise WeftError(
                    f"{kind} trains a parameter of shape {tuple(each.shape)} that the model has "
                    "not: make optimizers of this model's parameters, after shard_embeddings"
                )
            if each in trained:
                raise WeftError(f"{kind} trains {names[each]!r} twice: pass each parameter once")
            if each in seen:
                raise WeftError(
                    f"two optimizers train {names[each]!r}, of which a state holds what one keeps: "
                    "make a state of each optimizer by itself"
                )
            trained.add(each)
        seen |= trained
        for key, kept in optimizer.state.items():
            if key not in trained and not _is_empty(kept):
                of = repr(names[key]) if key in names else shown(key)
                raise WeftError(
                    f"{kind} keeps a state of {of}, which is none of its parameters, and of which "
                    "a checkpoint would have nothing: delete that from its state"
                )


def _is_empty(kept: object) -> bool:
    """Whether an entry was only looked at, which makes it."""
    return isinstance(kept, Mapping) and not kept


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state: Accelerate's has another inside, and none of its own."""
    while "state" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _tables(model: nn.Module) -> dict[Tensor, ShardedTable]:
    """The sharded tables whose weights a model has, under whatever names, by these."""
    found = shards_among(shards_by_name(model).values())
    return {shard: part for shard, part in found.items() if isinstance(part, ShardedTable)}


@contextmanager
def _under_all_names(model: nn.Module, tables: dict[Tensor, ShardedTable]) -> Iterator[None]:
    """Inside, the state of a model has each shard as a DTensor, under each of its names.

    A table sees to its own weight; a layer that is tied to one does not know that it has a shard.
    """
    with ExitStack() as hooks:
        for part in model.modules():
            hooked: Any = part  # torch has no types here
            for name, tensor in {**part._parameters, **part._buffers}.items():
                if tensor is not None and tensor in tables:
                    puts = _hook(put_shard, tables[tensor], name)
                    takes = _hook(take_rows, tables[tensor], name)
                    hooks.enter_context(hooked.register_state_dict_post_hook(puts))
                    hooks.enter_context(hooked.register_load_state_dict_pre_hook(takes))
        yield


def _hook(
    act: Callable[[ShardedTable, dict[str, Any], str], None], table: ShardedTable, name: str
) -> Callable[..., None]:
    """A hook for the state of a module that has the weight of a table under a name."""
    return lambda _, state, prefix, *others: act(table, state, f"{prefix}{name}")


def _with_sparse_gradients(model: nn.Module) -> set[Tensor]:
    """The weights of a model whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag, ShardedTable)
    parts = [*model.modules(), *_tables(model).values()]
    return {part.weight for part in parts if isinstance(part, kinds) and part.sparse}


_Member = tuple[torch.optim.Optimizer, dict[str, Any], Tensor]
"""A parameter of which an optimizer may keep something, with the optimizer and its group there."""


def _members(optimizers: list[torch.optim.Optimizer]) -> list[_Member]:
    return [
        (optimizer, group, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.is_floating_point() or parameter.is_complex()  # others are never trained
    ]


@contextmanager
def _state_of_all(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Iterator[set[Tensor]]:
    """Inside, optimizers have state of every parameter, and no parameter is frozen.

    torch.distributed.checkpoint makes state by a step with dense gradients at rate 0, which
    SparseAdam refuses, and which leaves other state than a training begins with; only for
    optimizers that have none at all; and it loads none of frozen parameters.

    Yields:
        The parameters of which nothing is kept: their state is what the optimizer begins with.
    """
    sparse = _with_sparse_gradients(model)
    members = _members(optimizers)
    before = [(each, each.grad, each.requires_grad) for _, _, each in members]
    states = [optimizer.state for optimizer in optimizers]
    begun: set[Tensor] = set()
    try:
        for optimizer in optimizers:
            kept_of = {key: kept for key, kept in optimizer.state.items() if not _is_empty(kept)}
            optimizer.state = defaultdict(dict, kept_of)
        for parameter, _, _ in before:
            parameter.grad = None  # so that an optimizer inside of another makes no step
            parameter.requires_grad = True
        for optimizer, group, parameter in members:
            if not optimizer.state.get(parameter):
                first = _first_state(optimizer, group, parameter, parameter in sparse)
                optimizer.state[parameter] = first
                if first:
                    begun.add(parameter)
        yield begun
    finally:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state = state
        for parameter, gradient, requires_grad in before:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient


def _sparse_states(optimizers: list[torch.optim.Optimizer]) -> set[tuple[Tensor, str]]:
    """Which tensors that optimizers keep are sparse: of which parameter, under which name."""
    found = set()
    for optimizer in optimizers:
        for weight, kept in optimizer.state.items():
            for key, each in kept.items():
                if isinstance(each, Tensor) and each.is_sparse:
                    found.add((weight, key))
    return found


@torch.no_grad()
def _first_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, is_sparse: bool
) -> dict[str, Any]:
    """What an optimizer begins with at a parameter, at the rates of now.

    It is found by a step of a copy of the optimizer with zeros in place of the parameter. What
    counts is what the optimizer puts into its state at first, and not what that is afterwards.

    Args:
        optimizer: it stays as it is.
        group: of its groups, the one with the parameter.
        parameter: it stays as it is.
        is_sparse: whether its gradients probably are.

    Raises:
        WeftError: the optimizer cannot begin with a gradient that is zero.
    """
    layouts = [torch.strided, torch.sparse_coo]
    errors = []
    for layout in reversed(layouts) if is_sparse else layouts:
        trial = object.__new__(type(optimizer))
        vars(trial).update(vars(optimizer))
        trial.state = defaultdict(_Firsts)
        try:
            zeros = torch.zeros_like(parameter)
            zeros.grad = torch.zeros_like(parameter, layout=layout)
            trial.param_groups = [{**group, "params": [zeros]}]
            inspect.unwrap(type(optimizer).step)(trial)  # as it was written, so without hooks
        except Exception as error:  # such as SparseAdam's of dense gradients, Adam's of sparse ones
            errors.append(error)
        else:
            found = trial.state[zeros]
            return found.firsts if isinstance(found, _Firsts) else found
    raise WeftError(
        f"{type(optimizer).__name__} keeps nothing of a parameter of shape "
        f"{tuple(parameter.shape)} yet, and cannot begin with a gradient that is zero: {errors[0]}"
    ) from errors[0]


class _Firsts(UserDict[str, Any]):
    """A dictionary that remembers what was put in first under each key."""

    def __init__(self) -> None:
        self.firsts: dict[str, Any] = {}
        super().__init__()

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.firsts:
            self.firsts[key] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        super().__setitem__(key, value)


def _groups(
    found: Any, optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The groups of optimizers as a state of torch's has them, each with its weights by name."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for named, group in zip(found["param_groups"], groups, strict=True):
        yield named, dict(zip(named["params"], group["params"], strict=True))


def _names_of_begun(given: Any) -> list[str]:
    """The names of the parameters of which nothing was kept when a state was made."""
    times = Counter(name for group in given["param_groups"] for name in group["params"])
    return [name for name, count in times.items() if count > 1]


def _check_names(given: Any, own: Any, frozen: set[str]) -> None:
    """Raise WeftError where a state lacks what an optimizer keeps.

    Args:
        given: the optimizers' part of it.
        own: that of a complete state of the optimizers that it is for.
        frozen: the names of parameters of which a state may lack all: one of torch's does.
    """
    if given == {}:
        raise WeftError("state['optimizer'] is of no optimizers: pass [] for the optimizers")
    wanted = {name for name, kept in own["state"].items() if kept} - frozen
    try:
        is_alike = _names_by_group(given) == _names_by_group(own)
        is_alike &= isinstance(given["state"], dict)
        lacking = [name for name in wanted if name not in given["state"]]
    except (KeyError, TypeError):
        is_alike = False
    if not is_alike:
        raise WeftError(
            "state['optimizer'] is not of these optimizers: their groups of parameters differ"
        )
    if lacking:
        raise WeftError(
            f"state['optimizer'] has nothing of {min(lacking)!r}, of which an optimizer keeps "
            "something: load the checkpoint into what sharded_state returns for these optimizers"
        )
    for name in sorted(wanted):
        kept = {*own["state"][name]}
        if not kept <= {*given["state"][name]}:
            raise WeftError(
                f"state['optimizer'] has {_listed(given['state'][name])} of {name!r}, of which "
                f"these optimizers keep {_listed(kept)}: load it into those of the same class"
            )


def _check_settings(
    given: Any,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    weights: Mapping[str, Tensor],
    free: set[Tensor],
) -> None:
    """Raise WeftError where a state has settings with which an optimizer keeps more than it has.

    The state was made for an optimizer with others, and so it asked the checkpoint for less.

    Args:
        given: the optimizers' part of it, which `_check_names` has passed.
        model, optimizers: which it is for.
        weights: the parameters that these train, by name.
        free: those of which a state may have nothing.
    """
    names = {weight: name for name, weight in weights.items()}
    tables = _tables(model)
    sparse = _with_sparse_gradients(model)
    groups = {name: group for group in given["param_groups"] for name in group["params"]}
    for optimizer, group, weight in _members(optimizers):
        name = names[weight]
        settings = groups[name]
        asking = settings.keys() - _WITHOUT_STATE - {"params"}
        changed = {key for key in asking if str(settings[key]) != str(group.get(key))}
        if weight in free or not changed:
            continue
        kept = given["state"].get(name, {})
        tried = {**group, **{key: settings[key] for key in changed}}
        some = weight.detach()[:1] if weight in tables else weight  # of a DTensor a row is sent
        try:
            first = _first_state(optimizer, tried, some, weight in sparse)
        except WeftError:  # such as of a step that needs a closure: what it keeps is not known
            continue
        if lacking := first.keys() - kept.keys():
            raise WeftError(
                f"state['optimizer'] has {_listed(kept)} of {name!r}, of which "
                f"{type(optimizer).__name__} keeps {_listed(lacking)}, too, with the settings of "
                f"the checkpoint: give the optimizer its {_listed(changed)} before sharded_state"
            )


def _listed(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _names_by_group(given: Any) -> list[list[str]]:
    return sorted(sorted({*group["params"]}) for group in given["param_groups"])


def _whole(table: ShardedTable | None, weight: Tensor, kept: Any) -> Any:
    """What an optimizer keeps of a parameter, as a checkpoint has it: dense; of a shard a DTensor.

    Args:
        table: whose shard the parameter is, or None.
        weight: the parameter.
        kept: one thing of those that are kept.

    Raises:
        WeftError: of a shard a tensor without a row for each of its rows, or more than numbers.
    """
    if table is None:
        return kept.to_dense() if isinstance(kept, Tensor) and kept.is_sparse else kept
    if isinstance(kept, Tensor) and kept.dim() and kept.shape[0] == weight.shape[0]:
        return table.as_dtensor(kept.to_dense() if kept.is_sparse else kept)
    if what := _more_than_numbers(kept):
        is_some = isinstance(kept, list | tuple | Mapping)
        where = f" in a {type(kept).__name__}" if is_some else ""
        raise WeftError(
            f"an optimizer keeps {what}{where} of a shard of shape {tuple(weight.shape)}, of which "
            "each rank may have another and none the whole: use an optimizer that keeps numbers "
            "row by row, or by element, in tensors"
        )
    return kept


def _more_than_numbers(kept: object) -> str | None:
    """What an optimizer keeps under one name that a rank may have for its rows alone, or None.

    It does not ask how many there are: a rank may have one row, or none.
    """
    if isinstance(kept, Tensor):
        return f"a tensor of shape {tuple(kept.shape)}" if kept.dim() else None
    if isinstance(kept, Mapping):
        return next(filter(None, map(_more_than_numbers, kept.values())), None)
    if isinstance(kept, list | tuple):
        return next(filter(None, map(_more_than_numbers, kept)), None)
    is_known = kept is None or isinstance(kept, Number | Enum | torch.dtype | torch.device)
    return None if is_known else f"a {type(kept).__name__}"
