"""`sync_params`: every rank's module becomes what it is on one rank.

All names, dtypes, shapes and shared tensors are compared before anything is overwritten. Then the
bytes go from rank to rank along a chain, in chunks, so that every link carries them once, each way
at most. Small tensors travel together; large ones go out from where they are and come in where they
belong.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), section 3, has the
pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from .._torch import uncompiled
from ..errors import WeftError
from ..wire import default
from ..wire.base import Pending, Wire, as_bytes, flattened, is_plain
from .named import difference, digest, expanded_dims, local, manifests_of_all, of_module
from .opening import opened
from .staging import host, on_host

_NAME = "sync_params"
_TOGETHER = 64 << 10  # bytes of a tensor that travels with others
_BATCH = 256 << 20  # bytes that are staged at once, where memory of the host must be
_CHUNKS = (128 << 10, 1 << 20)  # bytes of the smallest and the largest chunk
_CHANNEL = 4


@uncompiled
def sync_params(module: torch.nn.Module, group_src: int = 0, group: Any = None) -> None:
    """Give every rank the parameters and buffers that one rank has, in place.

    Args:
        module: with the same names, dtypes and shapes on every rank, on any device; tensors that
            are one and the same under several names stay that. Buffers that are not persistent
            are included. Of a DTensor each rank must have the same shard: pass the group of a mesh
            dimension along which it is replicated.
        group_src: the rank, in the group, whose values they are.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.

    Raises:
        WeftError: modules or arguments differ, naming the first difference and the ranks; the same
            text on every rank. Nothing was overwritten, and the next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost, and the values
            are undefined.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     model = torch.nn.Linear(2, 1)
        ...     torch.nn.init.constant_(model.weight, wire.rank)
        ...     weft.sync_params(model, group_src=1)
        ...     return model.weight.tolist()
        >>> run(2, program)
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    wire = default.resolve(group)
    found, manifest, error = of_module(module, buffers=True)
    whole = isinstance(group_src, int) and not isinstance(group_src, bool)
    if error is None and not (whole and 0 <= group_src < wire.size):
        error = f"group_src is {group_src!r}: pass a rank of the group, 0 to {wire.size - 1}"

    def job() -> None:
        with record_function("weft::sync_params"), torch.no_grad():
            fields = {"group_src": group_src}
            with opened(wire, _NAME, fields, error, digest=digest(manifest)) as said:
                pass
            if not said.equal:
                text = difference(manifests_of_all(wire, _NAME, manifest), missing=True)
                raise WeftError(f"the modules differ: {text}; nothing was overwritten")
            _broadcast(wire, group_src, [local(each.owner) for each in found])
            if wire.rank != group_src:
                for each in found:
                    if not each.owner.is_inference():
                        increment_version(each.owner)  # autograd did not see it change

    wire.worker.call(_NAME, job)


def _broadcast(wire: Wire, source: int, tensors: Sequence[Tensor]) -> None:
    """Fill tensors with what they are on one rank; collective."""
    if wire.size == 1:
        return
    here = wire.rank == source
    for batch in _batches(tensors):
        hosted = [tensor if _is_direct(tensor) else host(tensor) for tensor in batch]
        small = [tensor for tensor in hosted if tensor.nbytes <= _TOGETHER]
        large = [flattened(tensor) for tensor in hosted if tensor.nbytes > _TOGETHER]
        with wire.lease(sum(tensor.nbytes for tensor in small)) as memory:
            places = _cut(memory, [tensor.nbytes for tensor in small])
            if here:
                for tensor, place in zip(small, places, strict=True):
                    place.copy_(as_bytes(tensor))
            _chain(wire, source, [_of_their_dtype(memory, small), *large])
            if not here:
                for tensor, place in zip(small, places, strict=True):
                    as_bytes(tensor).copy_(place)
        if not here:
            for tensor, came in zip(batch, hosted, strict=True):
                if came is not tensor:
                    place = tensor
                    for dim in expanded_dims(tensor):
                        place, came = place.narrow(dim, 0, 1), came.narrow(dim, 0, 1)
                    place.copy_(came)


def _cut(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive pieces of so many bytes."""
    ends = [*accumulate(sizes, initial=0)]
    return [memory[start:end] for start, end in pairwise(ends)]


def _of_their_dtype(memory: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Memory that holds tensors, as numbers of their dtype if they have one."""
    dtypes = {tensor.dtype for tensor in tensors}
    return memory.view(*dtypes) if len(dtypes) == 1 else memory


def _is_direct(tensor: Tensor) -> bool:
    """Whether the wire can send from where a tensor is, and receive into it."""
    return on_host(tensor) and is_plain(tensor)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are on their way together: the same cut on every rank."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _chain(wire: Wire, source: int, pieces: Sequence[Tensor]) -> None:
    """Pass tensors, 1-D, on from rank to rank, chunk by chunk."""
    least, most = _CHUNKS
    total = sum(piece.nbytes for piece in pieces)
    nbytes = max(least, min(most, total // (4 * wire.size)))
    chunks = []
    for piece in pieces:
        step = nbytes // piece.itemsize
        chunks += [piece[start : start + step] for start in range(0, len(piece), step)]
    left, right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    coming: list[Pending] = []
    if wire.rank != source:
        coming = [wire.post((), [(left, chunk)], _CHANNEL) for chunk in chunks]
    sent: list[Pending] = []
    for number, piece in enumerate(chunks):
        if coming:
            coming[number].wait()
        if right != source:
            sent.append(wire.post([(right, piece)], (), _CHANNEL))
    for pending in sent:
        pending.wait()
