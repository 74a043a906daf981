"""`sparse_broadcast`: every rank gets the rows that one rank has.

It is a `sparse_all_gather` in which all others have no rows: few travel in the opening exchange;
more go between hosts from rank to rank along the ring in chunks, so a link carries them once; where
little comes altogether, and within a host, the source sends them to every rank.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...base.arguments import root_in, truth
from ...base.errors import untransformed
from ...call.attempt import preparing
from ...call.opening import opened
from ...group import default
from ...verbs.carrier import device_of_process
from .. import plain
from ..call import Call
from ..canonical import CanonicalRows
from ..choose import Line
from ..request import NOTHING, Request
from ..rows import Rows
from ..run import performed, sibling
from .all_gather import concatenated

_NAME = "sparse_broadcast"
# bytes: small ones fill the chain of hosts sooner, where 8 at 1 Gbit/s take 0.83 to 0.92 times as
# long; within a host large ones take 0.65 times as long
_CHUNK = 1 << 17


@untransformed
def sparse_broadcast(
    rows: Any,
    group_src: int = 0,
    group: object = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Send the rows of one rank to all ranks.

    Args:
        rows: on `group_src` a sparse COO tensor, `(indices, values)`, or `weft.Rows`; indices are
            int32 or int64, values `[k, *row_shape]` of any dtype. On the other ranks the argument
            is ignored: pass None.
        group_src: the rank, in the group, that sends its rows; the same on every rank.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once a `Work`, whose `wait()` gives the result. Do not change the input
            before `wait()` returns.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: values of wider
            floating-point dtypes are sent in this dtype, rounded once, to nearest even, also on the
            rank that sends them (docs/wire-dtype.md). Narrower values are sent unchanged; values
            that are not floating point are an error.

    Returns:
        On every rank the rows, unchanged but for `wire_dtype`, not sorted, with duplicates, in the
        form that `group_src` passed. On the other ranks they are on the CPU if those of `group_src`
        are, else on the current accelerator. The result has no gradient history.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     rows = (torch.tensor([7, 2]), torch.ones(2)) if group.rank == 1 else None
        ...     return weft.sparse_broadcast(rows, group_src=1)[0].tolist()
        >>> run(3, program)
        [[7, 2], [7, 2], [7, 2]]
    """
    group = default.resolve(group)
    src = root_in(group_src, group.size)
    here = group.rank == src
    forms: list[str] = []

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        forms.append(call.fields["form"])
        line = sibling(call, "ring")
        if call.verbs is not None:
            if here:  # the others learn from the opening on what device rows are
                opened(group, _NAME, {"device": call.verbs.name})
            return line, plain.of_source(call.verbs, call, src)
        if group.size > 2 and not call.sizes.on_one_host:
            call = replace(call, sizes=call.sizes.but(chunk=min(call.sizes.chunk, _CHUNK)))
        counts = [call.sizes.total * (rank == src) for rank in range(group.size)]
        return line, concatenated(rows, call, counts)

    def job() -> Any:
        received, _ = performed(group, request, _NAME, algorithm)
        (form,) = forms
        result = group.decode(src, "rows", _in_form, received, form)
        if isinstance(result, torch.Tensor):
            result._coalesced_(form.endswith(_COALESCED))
        return result

    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        request = Request.to_move(rows, wire_dtype) if here else request_of_listener(wire_dtype)
        request.take_root("group_src", src, group_src, group.size)
        request.fields["form"] = None
        if here:
            request.fields["form"] = _form_of(rows)
            request.fields["row shape"] = tuple(request.rows.row_shape)
        call.job = job
        call.device = request.device if here else device_of_process()
    return call.start()


_COALESCED = "coalesced"


def _form_of(rows: Any) -> str:
    """The form of the rows in words, so that the other ranks can give theirs the same."""
    if isinstance(rows, torch.Tensor):
        return f"{tuple(rows.shape)} {_COALESCED if rows.is_coalesced() else ''}"
    return "rows" if isinstance(rows, Rows) else "pair"


def _in_form(rows: Rows, form: str) -> Any:
    """The rows in a form that `_form_of` describes.

    Raises:
        ValueError: it is no form of these rows.
    """
    if form == "rows":
        return rows
    if form == "pair":
        return rows.indices, rows.values
    # `shape_in` refuses as many elements as a dense tensor cannot have
    sizes = form.removesuffix(_COALESCED).strip(" ()")
    shape = [int(size) for size in sizes.split(",") if size]
    heights = shape[: len(shape) - len(rows.row_shape)]
    if min(shape, default=0) < 0 or math.prod(heights) != rows.height:
        raise ValueError(f"({sizes}) is no shape of a height of {rows.height}")
    return rows.to_coo(shape)


def request_of_listener(wire_dtype: object) -> Request:
    """The request of a rank that receives: it knows neither dtypes nor row shape."""
    request = Request.to_move(NOTHING, wire_dtype)
    unknown = ("index dtype", "value dtype", "row shape", "height", "device")
    request.fields.update(dict.fromkeys(unknown))
    return request
