"""What is wrong with the arguments of a call, in a sentence without the rank, or None."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..base import _torch
from ..base.arguments import shown
from ..base.tensors import has_elements, is_plain, lacking, serves, shares_elements
from ..group.group import Group
from ..schedules import dense
from .exchanges import open_call
from .tensors import elements, tensors_in

_SHOWN = 8  # sizes that an error names


def refuse(group: Group, call: str, error: str) -> list[Tensor]:
    """Take part in a call with nothing but the error of this rank's arguments: all ranks raise it.

    Args:
        group: the ranks that make the call.
        call: its name.
        error: what is wrong, in a sentence without the rank.
    """
    open_call(group, call, {}, error)
    raise AssertionError("the opening exchange raises a rank's error on every rank")


def unsendable(argument: object) -> str | None:
    """What is wrong with the first tensor in an argument that has no elements to send, or None.

    It is asked before anything else of them is: what has no elements need not have a size.
    """
    for tensor in tensors_in(argument):
        own = _torch.waited(tensor)
        if not has_elements(own):
            return (
                f"a tensor is {lacking(own)}: pass tensors with elements in memory; all_reduce "
                "alone takes sparse ones, too"
            )
        if not is_plain(own) and not serves(torch.clone, own.dtype):
            return f"a tensor is {own.dtype}, which torch does not copy: pass a contiguous one"
    return None


def unwritable(tensors: object) -> str | None:
    """What is wrong with the first of some tensors to which no result can be written, or None."""
    for tensor in tensors_in(tensors):
        if tensor.layout == torch.strided and shares_elements(elements(tensor)):
            return (
                "elements of a tensor to be written share memory, as expand() has them: pass a "
                "contiguous one"
            )
    return None


def reason(tensors: Sequence[Tensor], op: str | None = None) -> str | None:
    """What is wrong with a call's tensors, in a sentence, or None."""
    if not tensors:
        return None
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}: this backend moves CPU tensors, so copy it"
        if tensor.dtype != first.dtype:
            return f"tensors of {first.dtype} and of {tensor.dtype} were given: pass one dtype"
        if tensor.is_quantized:
            return "a tensor is quantized, and its scale is not in its memory: pass it dequantized"
    return None if op is None else dense.refuses(op, first.dtype)


def no_root(group: Group, root: int) -> str | None:
    """The error if the root is no rank of the group, or None."""
    if 0 <= root < group.size:
        return None
    return (
        f"the root is rank {shown(root)}, and there are ranks 0 to {group.size - 1}: pass one of "
        "these"
    )


def misfit(what: str, parts: Sequence[Tensor], counts: Sequence[int | None]) -> str | None:
    """The error if there is not one tensor for each count, with that many elements; or None."""
    if len(parts) != len(counts):
        return (
            f"{len(parts)} {what}s were given, and {len(counts)} are wanted: pass one for each "
            "rank, and none where another rank is the root"
        )
    for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if count is not None and part.numel() != count:
            return (
                f"{what} {rank} has {part.numel()} elements, and the tensor that goes with it "
                f"{count}: they must be as many"
            )
    return None


def misfits(group: Group, outs: Sequence[Sequence[Tensor]], mine: Sequence[Tensor]) -> str | None:
    """The error if there is not one list for each rank, or this rank's does not fit; or None."""
    if len(outs) != group.size:
        return f"{len(outs)} lists of outputs were given: pass one for each of {group.size} ranks"
    own = outs[group.rank]
    if [each.numel() for each in own] == [each.numel() for each in mine]:
        return None
    return (
        f"the inputs have {_sizes(mine)} elements, and the outputs in the list of this rank "
        f"{_sizes(own)}: they must be as many"
    )


def unlike(what: str, whole: Tensor, parts: str, part: Tensor, ranks: int) -> str | None:
    """The error if a tensor has not as many elements as a part of each rank together, or None."""
    count = ranks * part.numel()
    if whole.numel() == count:
        return None
    return f"the {what} has {whole.numel()} elements, and the {parts} of {ranks} ranks {count}"


def uneven(what: str, tensor: Tensor, sizes: list[int], ranks: int) -> str | None:
    """The error if a tensor cannot be cut into one part of these sizes for each rank, or None."""
    if not tensor.dim():
        return f"the {what} has no dimension to be cut along: pass one of at least one dimension"
    rows = tensor.shape[0]
    if not sizes and rows % ranks:
        return (
            f"the {what} has {rows} along dimension 0, of which {ranks} ranks cannot get equal "
            "parts: pass split sizes"
        )
    if sizes and (len(sizes) != ranks or sum(sizes) != rows):
        return (
            f"the {what} has {rows} along dimension 0, and its split sizes are {_shown(sizes)}: "
            f"pass {ranks} sizes of this sum"
        )
    return None


def _sizes(tensors: Sequence[Tensor]) -> str:
    return _shown([each.numel() for each in tensors])


def _shown(sizes: Sequence[int]) -> str:
    text = ", ".join(map(shown, sizes[:_SHOWN]))
    return f"{text} ..." if len(sizes) > _SHOWN else text or "no"


def first_of(errors: Iterable[str | None]) -> str | None:
    """The first error that there is, or None."""
    return next(filter(None, errors), None)
