"""The tensors of a module by name, and how ranks find where their modules differ.

Ranks compare digests of their *manifests*. Only if digests differ, they exchange the manifests, so
that every rank raises the same error, which names the first difference.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..base.errors import WeftError, check, conclusion
from ..base.tensors import extent, shares_elements, unreadable
from ..call.mode import PLAIN
from ..group.group import Group
from .all_to_all import Scatter
from .staging import unsendable

T = TypeVar("T", bound=Tensor)

Manifest = dict[str, str]
"""A description in words of each tensor, by name."""


def of_module(module: object, *, buffers: bool) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors of a module, and its manifest.

    Both are in the order of names. One that comes again does so under the first name; with buffers,
    which are sent by value, tensors in the same memory are one.

    Raises:
        WeftError: it cannot be synchronised.
    """
    if not isinstance(module, nn.Module):
        raise WeftError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    found: dict[str, Tensor] = {}
    manifest: Manifest = {}
    first: dict[object, str] = {}
    # by name, since the order in which modules have them may differ between ranks
    for kind, name, tensor in sorted(_tensors(module, buffers), key=lambda each: each[1]):
        if is_lazy(tensor):
            raise WeftError(f"{kind} {name!r} has no shape yet: run the module once")
        place = local(tensor)
        check(unsendable(f"{kind} {name!r}", place))
        # parameters are told apart by identity, for each has a gradient of its own; so are empty
        # tensors: by that of the owner, since `place` is freed
        memory = place.device, place.data_ptr(), place.dtype, place.shape, place.stride()
        key = memory if buffers and place.numel() else id(tensor)
        if buffers and shares_elements(place):
            raise WeftError(f"elements of {kind} {name!r} share memory: make it contiguous")
        text = description(kind, tensor)
        if key in first:
            text += f", the same as {first[key]!r}"
        else:
            first[key] = name
            found[name] = tensor
        manifest[name] = text
    if buffers and (pair := next(overlaps(found), None)):
        name, other = pair
        raise WeftError(f"{name!r} and {other!r} lie in the same memory: clone() one of them")
    return found, manifest


def description(kind: str, tensor: Tensor) -> str:
    """A tensor of a module in words, for its manifest; `kind` is "parameter" or "buffer"."""
    place = local(tensor)
    where = "" if place.is_cpu else f"{place.device.type} "
    return f"a {where}{kind} of {place.dtype} of shape {tuple(place.shape)}{shard_of(tensor)}"


class Cut(nn.Module, ABC):
    """A module of whose weight each rank has other rows: a sharded table of `weft.nn`'s."""

    weight: nn.Parameter

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Also what `copy` and `pickle` begin with: from here on the weight is known as a shard."""
        made = super().__new__(cls)
        with _lock:
            _alive.add(made)
        return made

    @abstractmethod
    def _group(self) -> Group:
        """Of the ranks that have the rows."""


_alive: weakref.WeakSet[Cut] = weakref.WeakSet()  # of this process; ranks may be threads
_lock = threading.RLock()  # again by the same thread, where a garbage collection makes a module


def shards_among(given: Iterable[T]) -> dict[T, Cut]:
    """Those of some tensors of which each rank has other rows, each with the module it is cut by.

    A shard is known by itself, from wherever a caller has it: other modules may have it, too, as
    a tied layer does. A module's weight may be another object by now than when the module was
    made, so it is asked for.
    """
    with _lock:
        found = {vars(each).get("_parameters", {}).get("weight"): each for each in _alive}
    return {each: found[each] for each in given if each in found}


def groups_of_shards(given: Iterable[Tensor]) -> dict[Tensor, Group]:
    """Those of some tensors of which each rank has other rows, each with the ranks' group."""
    return {shard: part._group() for shard, part in shards_among(given).items()}


def shards_by_name(module: nn.Module) -> dict[str, Tensor]:
    """The shards that a module has, each under each of its names."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= module.named_buffers(remove_duplicate=False)
    shards = shards_among(named.values())
    return {name: tensor for name, tensor in named.items() if tensor in shards}


def shares_calls(module: nn.Module, group: Group) -> bool:
    """Whether a module has a shard whose calls come among those of a group."""
    groups = groups_of_shards(module.parameters())
    return any(each.session is group.session for each in groups.values())


def _tensors(module: nn.Module, buffers: bool) -> list[tuple[str, str, Tensor]]:
    """Those that are not cut over ranks, each with its kind, under each of its names."""
    found: list[tuple[str, str, Tensor]] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.append(("parameter", name, parameter))
    for name, buffer in module.named_buffers(remove_duplicate=False) if buffers else ():
        found.append(("buffer", name, buffer))
    shards = shards_among(tensor for _, _, tensor in found)
    return [each for each in found if each[2] not in shards]


def overlaps(found: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The names of tensors that begin inside the memory of another, each with the other's name.

    Writing to one of them changes both. On a rank where the two are separate it would not.
    """
    extents = [
        (str(place.device), *extent(place), name)
        for name, owner in found.items()
        if (place := local(owner)).numel()
    ]
    last = None
    # of tensors with the same start, the longest first: it contains the others
    for device, start, end, name in sorted(extents, key=lambda e: (e[0], e[1], -e[2], e[3])):
        if last is not None and last[0] == device and start < last[1]:
            yield name, last[2]
        if last is None or last[0] != device or end > last[1]:
            last = device, end, name


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, detached: a DTensor's shard, else the whole tensor."""
    plain: Any = tensor.detach()
    here: Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return here


def wrong_gradient(what: str, gradient: Tensor) -> str | None:
    """Why a gradient, called `what`, cannot be read on this rank, or None."""
    if gradient.layout == torch.strided:
        parts = [local(gradient)]
    elif gradient.layout == torch.sparse_coo:
        parts = [gradient._indices(), gradient._values()]
    else:
        return f"{what} has layout {gradient.layout}: use strided or sparse COO"
    why = next(filter(None, map(unreadable, parts)), None)
    return why and f"{what} is {why}"


def shard_of(tensor: Tensor) -> str:
    """A clause that says which shard of a DTensor is here; empty for a whole tensor."""
    spec: Any = tensor
    if not hasattr(spec, "to_local"):
        return ""
    coordinate = spec.device_mesh.get_coordinate() or ()
    cut = [
        f"{placement} at {place}"
        for placement, place in zip(spec.placements, coordinate, strict=False)
        if not placement.is_replicate()
    ]
    return f", {', '.join(cut)} of a DTensor" if cut else ""


def digest(manifest: Manifest) -> int:
    """An int64 that tells manifests apart."""
    code = hashlib.blake2b(json.dumps(manifest).encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True)


def raise_difference(group: Group, name: str, manifest: Manifest) -> NoReturn:
    """Exchange manifests whose digests differ; collective, inside a call's turn.

    Args:
        group, name: of the call, which has changed nothing yet.
        manifest: this rank's.

    Raises:
        WeftError: what is not the same on all ranks; the same text on each.
    """
    text = json.dumps(manifest).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts, _ = Scatter(group, f"{name} (what differs)").run([mine] * group.size, PLAIN)
    said = [group.decode(peer, "a manifest", _manifest_in, each) for peer, each in enumerate(texts)]
    manifests = {group.rank_in_errors(rank): theirs for rank, theirs in enumerate(said)}
    raise conclusion(f"the modules differ: {_difference(manifests)}; nothing was changed")


def _manifest_in(text: Tensor) -> Manifest:
    """Read a rank's manifest. Raises any Exception if it is invalid."""
    manifest = json.loads(bytes(text.numpy()))
    return {name: str(said) for name, said in manifest.items()}


def _difference(manifests: Mapping[int, Manifest]) -> str:
    """The first difference of the manifests, each of a rank, in a sentence."""
    names = dict.fromkeys(name for manifest in manifests.values() for name in manifest)
    for name in names:
        base = next(rank for rank, manifest in manifests.items() if name in manifest)
        for rank, manifest in manifests.items():
            said = manifest.get(name)
            if said is None:
                return f"rank {rank} has no {name!r}, on rank {base} it is {manifests[base][name]}"
            if said != manifests[base][name]:
                return (
                    f"{name!r} is {manifests[base][name]} on rank {base}, and {said} on rank {rank}"
                )
    raise AssertionError("manifests with different digests differ")
