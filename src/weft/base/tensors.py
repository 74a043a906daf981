"""Whether a tensor has elements in memory, which is what can be sent; what it is if not; and where.

Each call asks this of what it is given before it tells the other ranks of it. What stands for
others, or for none, would fail where their elements are read: in the middle of an exchange.

What ranks tell each other of dtypes and shapes is text: `dtype_in` and `shape_in` read it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ._torch import is_wrapped, lacks_address

Shape = tuple[int, ...]
"""Extents, indices or offsets: one integer for each dimension."""


def has_elements(tensor: Tensor) -> bool:
    """Whether a tensor is plain values in memory, with strides.

    No sparse, nested, quantized, meta or lazy one is.

    Nor does one that is made of others, such as a DTensor: that has its own ways to move.

    Example:
        >>> import torch
        >>> has_elements(torch.ones(2)), has_elements(torch.ones(2, device="meta"))
        (True, False)
    """
    if type(tensor) is not Tensor and (is_lazy(tensor) or is_made_of_others(tensor)):
        return False
    # nested tensors of the older kind have a strided layout, and no shape
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    try:
        start, end = extent(tensor)
        if not start:  # it is empty, was freed, as FSDP does, or stands for zeros
            return not tensor.numel() and not tensor.is_meta
        storage = tensor.untyped_storage()  # which may have been made smaller
        return end <= storage.data_ptr() + storage.nbytes()
    except RuntimeError:  # it stands for another
        return False


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether its elements, if there are any, are those of other tensors."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_transformed(tensor: Tensor) -> bool:
    """Whether it stands for another, or many, in a transform of torch.func's, or did in one."""
    return is_wrapped(tensor) or lacks_address(tensor)  # as batches in `torch.autograd.grad` do


def lacking(tensor: Tensor) -> str:
    """What a tensor without elements is, and what makes it plain, for error messages.

    Example:
        >>> import torch
        >>> lacking(torch.ones(2, device="meta"))
        'on the meta device, where nothing is held'
    """
    if is_lazy(tensor):
        return "of no shape yet"
    if tensor.is_nested:
        return "nested, which to_padded_tensor() makes plain"
    if is_made_of_others(tensor):
        plain = ", which to_local() makes plain" if hasattr(tensor, "to_local") else ""
        return f"a {type(tensor).__name__}{plain}"
    if tensor.is_meta:
        return "on the meta device, where nothing is held"
    if is_transformed(tensor):
        return "in a transform such as torch.func.grad or vmap, which this call does not follow"
    if tensor.layout == torch.strided:
        if tensor.is_quantized:
            return "quantized, which int_repr() or dequantize() makes plain"
        if tensor.data_ptr():
            return "larger than its memory: the storage was made smaller"
        return "without memory: it was freed, or stands for zeros"
    return f"of layout {tensor.layout}, which to_dense() makes plain"


def unreadable(tensor: Tensor) -> str | None:
    """Why the elements of a strided tensor cannot be read, and the remedy; None if they can.

    Unlike `has_elements` it lets tensors pass that are made of others and show their elements.

    Example:
        >>> unreadable(torch.ones(2, device="meta"))
        'on the meta device, where nothing is held: pass one with data'
    """
    if type(tensor) in (Tensor, torch.nn.Parameter) or tensor.is_nested:
        return None if has_elements(tensor) else f"{lacking(tensor)}: pass one with data"
    try:
        as_bytes(plain(tensor.detach()))[:1].cpu().tolist()
    except Exception as error:  # whatever the subclass has to say
        reason = f"{error}".partition("\n")[0].rstrip(".")
        kind = type(tensor).__name__
        return f"a {kind}, which cannot be read ({reason}): pass a plain tensor"
    return None


@functools.cache
def serves(operation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether torch has an operation for tensors of this dtype, on the CPU."""
    try:
        operation(torch.empty(1, dtype=dtype, device="cpu"))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, made in inference mode or outside of it; autograd records nothing.

    Example:
        >>> with torch.inference_mode():
        ...     made = torch.zeros(2)
        >>> write(made, torch.ones(2))
        >>> made
        tensor([1., 1.])
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # False has gradients on
        tensor.copy_(values)


def mark_overwritten(tensors: Iterable[Tensor]) -> None:
    """Have autograd know that tensors were overwritten, in a way that it did not see.

    A backward that was to read what they held before then raises.
    """
    with torch.inference_mode():  # in which those that were made in it may be, too
        torch.autograd.graph.increment_version([*tensors])


def overlapping(*tensors: Tensor) -> bool:
    """Whether two of some tensors have memory in common, or lie one within the other."""
    extents = sorted((str(each.device), *extent(each)) for each in tensors if each.numel())
    return any(
        device == other and start < end
        for (device, _, end), (other, start, _) in itertools.pairwise(extents)
    )


def extent(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and of that behind its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.itemsize


def shares_elements(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor share memory: what is written to one is in others, too.

    Dimensions that are woven into each other count as such, which only `as_strided` makes.

    Example:
        >>> import torch
        >>> shares_elements(torch.ones(1).expand(2)), shares_elements(torch.ones(4).unfold(0, 3, 1))
        (True, True)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    last = 0  # where the dimensions of smaller steps lead to
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step <= last:
            return True
        last += (size - 1) * step
    return False


def unwritable(tensor: Tensor) -> str | None:
    """Why nothing can be written to a tensor of the caller's, and the remedy; None if it can.

    Example:
        >>> unwritable(torch.ones(1).expand(2))
        'one whose elements share memory: pass a clone of it'
    """
    if not has_elements(tensor):
        return f"{lacking(tensor)}: pass a strided tensor with data"
    if shares_elements(tensor):
        return "one whose elements share memory: pass a clone of it"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "of inference mode: pass a clone of it"
    return None


def dtype_in(text: str) -> torch.dtype:
    """The dtype that `str` made this of. Raises TypeError if it is of none."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{text} is no dtype")
    return dtype


MOST_DIMS = 32
"""Dimensions of a tensor that is sent, at most: NumPy 1.26 knows no more."""


def wrong_dims(tensor: Tensor) -> str | None:
    """What is wrong with the number of dimensions of a tensor, as a clause, or None."""
    if tensor.dim() <= MOST_DIMS:
        return None
    return f"has {tensor.dim()} dimensions: pass a view of {MOST_DIMS} or fewer"


_TOO_MANY = 1 << 60  # elements, whose bytes 64 bits cannot count


def wrong_row_shape(row_shape: Sequence[int]) -> str | None:
    """What is wrong with the shape of rows, or None: tensors without rows may have any."""
    if math.prod(row_shape) < _TOO_MANY:
        return None
    return f"have rows of shape {tuple(row_shape)}, of which none fits in memory: pass smaller ones"


def shape_in(text: str) -> tuple[int, ...]:
    """The shape that a text is the `str` of.

    `ast.literal_eval` is not used: it fails in several threads at once (CPython's gh-106905).

    Raises:
        ValueError: the text is not that of a shape.
    """
    shape = tuple(int(part) for part in text.strip("()").split(",") if part)
    if min(shape, default=0) < 0 or math.prod(shape) >= _TOO_MANY:
        raise ValueError(f"{text} is no shape")
    return shape


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes are its elements one after the other.

    They are not if torch has postponed a conjugation or a change of sign.
    """
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """A plain tensor (`is_plain`) of the same values: the tensor itself if it is plain."""
    return tensor if is_plain(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def in_format_of(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor with the order of dimensions in memory that another has, by which convolutions go.

    It is the tensor itself, contiguous, unless the other one is in the format `channels_last`, or
    `channels_last_3d`, and has as many dimensions.

    Example:
        >>> import torch
        >>> image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        >>> in_format_of(image, torch.ones(2, 3, 6, 6)).stride()
        (108, 1, 18, 3)
    """
    found = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if found is None or tensor.dim() != like.dim():
        return tensor
    if like.is_contiguous() or not like.is_contiguous(memory_format=found):
        return tensor
    return tensor.contiguous(memory_format=found)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor, as uint8, 1-D."""
    if not tensor.numel():
        return tensor.new_empty(0, dtype=torch.uint8)
    return flattened(tensor).view(torch.uint8)


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor, 1-D, in the same memory."""
    # not view(-1): what expand() makes of one element is contiguous, too, with a stride of 0
    return tensor.as_strided((tensor.numel(),), (1,))


def there(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Numbers in the dtype and on the device of a tensor, for which the host does not wait."""
    made = torch.tensor(numbers, dtype=like.dtype, device="cpu", pin_memory=not like.is_cpu)
    return made.to(like.device, non_blocking=True)
