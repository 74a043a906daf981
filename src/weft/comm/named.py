"""The tensors of a module by name, and what ranks say to each other of where they differ.

Ranks compare digests of their *manifests*; only where those differ do they exchange the manifests
themselves, so that every rank knows, and says, what the first difference is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..sparse.call import extent
from ..tensors import has_elements, lacking
from ..wire.base import Wire
from .all_to_all import Scatter
from .opening import Mode
from .staging import is_movable

Manifest = dict[str, str]
"""What each tensor is, in words, by name."""


@dataclass(frozen=True, slots=True)
class Named:
    """One tensor of a module; those that share memory with an earlier one are named there.

    Attributes:
        name: as the module says it.
        owner: the parameter or the buffer itself.
    """

    name: str
    owner: Tensor


def of_module(module: object, *, buffers: bool) -> tuple[list[Named], Manifest, str | None]:
    """The tensors of a module, its manifest, and why it cannot be synchronised, or None.

    In the order of their names. Tensors that are the same memory come once, under the first.
    """
    if not isinstance(module, nn.Module):
        return [], {}, f"module is a {type(module).__name__}: pass a torch.nn.Module"
    found: list[Named] = []
    manifest: Manifest = {}
    first: dict[object, str] = {}
    # by name, since the order in which modules have them may differ between ranks
    for kind, name, tensor in sorted(_tensors(module, buffers), key=lambda each: each[1]):
        if is_lazy(tensor):
            return [], {}, f"{kind} {name!r} has no shape yet: run the module once"
        place = local(tensor)
        if not has_elements(place):
            why = f"{kind} {name!r} is {lacking(place)}: only strided tensors with memory can move"
            return [], {}, why
        if not is_movable(place.dtype):
            return [], {}, f"{kind} {name!r} is {place.dtype}, which torch does not copy"
        # what has no memory is told apart by itself; `place` is gone after this round
        key = _memory(place) if place.numel() else id(tensor)
        text = f"a {kind} of {place.dtype} of shape {tuple(place.shape)}{shard_of(tensor)}"
        if buffers and expanded_dims(place):
            text += ", expanded"  # it cannot become what is not
        if key in first:
            text += f", the same as {first[key]!r}"
        else:
            first[key] = name
            found.append(Named(name, tensor))
        manifest[name] = text
    if buffers:
        for name, other in _overlaps(found):
            manifest[name] += f", in memory that {other!r} has, too"
    return found, manifest, None


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a module, by name; those that are the same memory are there once.

    Attributes:
        of: the parameters themselves, sorted by name.
        in_order: their names, as the module has them.
        manifest: what they and all others are.
        digest: of the manifest.
    """

    of: dict[str, Tensor]
    in_order: list[str]
    manifest: Manifest
    digest: int


def parameters_of(module: object) -> tuple[Parameters, str | None]:
    """The parameters of a module, and why they cannot be synchronised, or None.

    A training loop asks for the same in each step: then they are looked at, but not described
    again. Nothing that is remembered keeps a tensor.
    """
    listed = list(module.named_parameters(remove_duplicate=False)) if _is_module(module) else []
    looks = [_look(name, tensor) for name, tensor in listed]
    known = _remembered.get(module) if _is_module(module) else None
    if known is None or known.looks != looks or None in looks:
        found, manifest, error = of_module(module, buffers=False)
        names = [each.name for each in found]
        known = _Remembered(looks, names, manifest, digest(manifest))
        if error is not None:
            return Parameters({}, [], manifest, known.digest), error
        if _is_module(module):
            _remembered[module] = known
    there: dict[str, Tensor] = dict(listed)
    of = {name: there[name] for name in known.names}
    return Parameters(of, [n for n in there if n in of], known.manifest, known.digest), None


@dataclass(frozen=True, slots=True)
class _Remembered:
    looks: list[object]
    names: list[str]
    manifest: Manifest
    digest: int


_remembered: WeakKeyDictionary[nn.Module, _Remembered] = WeakKeyDictionary()


def _is_module(module: object) -> TypeGuard[nn.Module]:
    return isinstance(module, nn.Module)


def _look(name: str, tensor: Tensor) -> object:
    """Equal for what `of_module` describes alike; None of what is told apart by more than this."""
    if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
        return None
    # those without elements are told apart by what they are
    return name, id(tensor), *_memory(tensor)


def _tensors(module: nn.Module, buffers: bool) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    if buffers:
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield "buffer", name, buffer


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory, seen alike."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _overlaps(found: Sequence[Named]) -> Iterator[tuple[str, str]]:
    """The tensors that begin within the memory of another, and that one.

    What is written into such a one is in both; where other ranks hold them apart it is not.
    """
    extents = [
        (str(place.device), *extent(place), each.name)
        for each in found
        if (place := local(each.owner)).numel()
    ]
    last = None
    # of those that begin alike the longest first: it is the one that holds the others
    for device, start, end, name in sorted(extents, key=lambda e: (e[0], e[1], -e[2], e[3])):
        if last is not None and last[0] == device and start < last[1]:
            yield name, last[2]
        if last is None or last[0] != device or end > last[1]:
            last = device, end, name


def expanded_dims(tensor: Tensor) -> list[int]:
    """The dimensions along which elements share memory, so that torch does not write it."""
    if tensor.is_contiguous():
        return []
    steps = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
    return [dim for dim, (step, length) in steps if step == 0 and length > 1]


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, without its history: a DTensor's shard, else all of it."""
    plain: Any = tensor.detach()
    here: Tensor = plain.to_local() if _is_dtensor(plain) else plain
    return here


def shard_of(tensor: Tensor) -> str:
    """Which part of a DTensor is here, as a clause; nothing for what is whole."""
    if not _is_dtensor(tensor):
        return ""
    spec: Any = tensor
    coordinate = spec.device_mesh.get_coordinate() or ()
    cut = [
        f"{placement} at {place}"
        for placement, place in zip(spec.placements, coordinate, strict=False)
        if not placement.is_replicate()
    ]
    return f", {', '.join(cut)} of a DTensor" if cut else ""


def _is_dtensor(tensor: Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # nobody has one who did not import it
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def digest(manifest: Manifest) -> int:
    """An int64 that tells manifests apart."""
    code = hashlib.blake2b(_text(manifest), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True)


def _text(manifest: Manifest) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def manifests_of_all(wire: Wire, name: str, manifest: Manifest) -> list[Manifest]:
    """Every rank's manifest; collective, inside of a call whose turn it is."""
    text = torch.frombuffer(bytearray(_text(manifest)), dtype=torch.uint8)
    texts, _ = Scatter(wire, f"{name} (what differs)").now([text] * wire.size, Mode())
    return [json.loads(bytes(text.numpy())) for text in texts]


def difference(manifests: Sequence[Manifest], *, missing: bool) -> str | None:
    """How manifests first differ, in a sentence that is the same on every rank, or None.

    Args:
        manifests: of all ranks.
        missing: whether a name that some ranks do not have is a difference.
    """
    names = dict.fromkeys(name for manifest in manifests for name in manifest)
    for name in names:
        base = next(rank for rank, manifest in enumerate(manifests) if name in manifest)
        for rank, manifest in enumerate(manifests):
            said = manifest.get(name)
            if said is None and missing:
                return f"rank {rank} has no {name!r}, on rank {base} it is {manifests[base][name]}"
            if said is not None and said != manifests[base][name]:
                return (
                    f"{name!r} is {manifests[base][name]} on rank {base}, and {said} on rank {rank}"
                )
    return None
