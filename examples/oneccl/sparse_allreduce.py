"""oneCCL's example of sparse_allreduce, in its three generations.

Every rank sends COUNT_I - rank rows of VDIM_SIZE values. Indices are drawn from 0 up to RANGE, so
they repeat on a rank and between ranks. The expected result is added up in a loop over all ranks'
rows. Every rank compares its result with that: the same indices, each once and ascending, and the
same values.

    python sparse_allreduce.py
    torchrun --nproc-per-node 4 sparse_allreduce.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import weft
from weft.compat.oneccl import callback, event, request

COUNT_I = 128
VDIM_SIZE = 16
RANGE = 255

INDEX_TYPES = ("uint8", "int32", "int64")  # of int8, RANGE is too high
VALUE_TYPES = ("int8", "int32", "bfloat16", "float32", "float64", "int64")


@dataclass
class Data:
    """One rank's rows, and what is expected of all."""

    send_ibuf: Tensor
    send_vbuf: Tensor
    expected: dict[int, Tensor]

    def check(self, what: str, indices: Tensor, values: Tensor) -> None:
        """Compare a result, index by index and value by value."""
        if indices.tolist() != sorted(self.expected):
            raise SystemExit(f"FAILED: {what}: indices are {indices.tolist()}")
        for index, got in zip(indices.tolist(), values.view(-1, VDIM_SIZE), strict=True):
            if not torch.equal(got, self.expected[index]):
                raise SystemExit(f"FAILED: {what}: row {index} is {got}")


def prep_data(comm: event.Communicator, itype: str, vtype: str, reduction: str) -> Data:
    """Rows of this rank, and the reduction of all ranks' rows, done by hand."""
    index, dtype = getattr(torch, itype), getattr(torch, vtype)
    everyone = []
    for rank in range(comm.size()):
        draw = torch.Generator().manual_seed(rank)
        ibuf = torch.randint(RANGE + 1, (COUNT_I - rank,), generator=draw).to(index)
        vbuf = torch.arange(VDIM_SIZE) % 3 + rank % 2 - 1  # so small that nothing is rounded
        everyone.append((ibuf, vbuf.expand(len(ibuf), VDIM_SIZE).to(dtype).contiguous()))
    expected: dict[int, Tensor] = {}
    for ibuf, vbuf in everyone:
        for i, row in zip(ibuf.tolist(), vbuf, strict=True):
            if i not in expected:
                expected[i] = row
            elif reduction == "sum":
                expected[i] = expected[i] + row
            else:
                expected[i] = torch.maximum(expected[i], row)
    return Data(*everyone[comm.rank()], expected)


def run_request(data: Data, itype: str, vtype: str, reduction: str) -> None:
    """The first generation: the result goes to buffers of the caller's."""
    recv_ibuf = torch.empty(RANGE + 1, dtype=data.send_ibuf.dtype)
    recv_vbuf = torch.empty((RANGE + 1) * VDIM_SIZE, dtype=data.send_vbuf.dtype)
    recv_icount, recv_vcount = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    request.sparse_allreduce(
        data.send_ibuf, data.send_ibuf.numel(), data.send_vbuf, data.send_vbuf.numel(),
        recv_ibuf, recv_icount, recv_vbuf, recv_vcount, itype, vtype, reduction,
    ).wait()  # fmt: skip
    data.check("request", recv_ibuf[: recv_icount.item()], recv_vbuf[: recv_vcount.item()])


@dataclass
class Received:
    """Where a callback puts the result for its caller: the `void*` of C++."""

    ibuf: Tensor = field(default_factory=lambda: torch.empty(0))
    vbuf: Tensor = field(default_factory=lambda: torch.empty(0))


def completion(
    i_buf: Tensor,
    i_cnt: int,
    itype: torch.dtype,
    v_buf: Tensor,
    v_cnt: int,
    vtype: torch.dtype,
    fn_ctx: callback.ccl_fn_context_t,
    user_ctx: Received,
) -> callback.ccl_status_t:
    """The second generation's completion callback."""
    assert (i_buf.numel(), i_buf.dtype, v_buf.numel(), v_buf.dtype) == (i_cnt, itype, v_cnt, vtype)
    assert fn_ctx.match_id == "sparse"
    user_ctx.ibuf, user_ctx.vbuf = i_buf.clone(), v_buf.clone()
    return callback.ccl_status_success


def run_callback(data: Data, itype: str, vtype: str, reduction: str) -> None:
    """The second generation: the result goes to a callback."""
    received = Received()
    attributes = callback.Attributes(
        match_id="sparse",
        sparse_allreduce_completion_fn=completion,
        sparse_allreduce_completion_ctx=received,
    )
    callback.sparse_allreduce(
        data.send_ibuf, data.send_ibuf.numel(), data.send_vbuf, data.send_vbuf.numel(),
        None, 0, None, 0, itype, vtype, reduction, attributes,
    ).wait()  # fmt: skip
    data.check("callback", received.ibuf, received.vbuf)


def completion_fn(
    i_buf: Tensor, i_cnt: int, itype: Any, v_buf: Tensor, v_cnt: int, vtype: Any, ctx: Received
) -> None:
    """The third generation's completion callback."""
    ctx.ibuf, ctx.vbuf = i_buf.clone(), v_buf.clone()


def alloc_fn(
    i_cnt: int, itype: torch.dtype, v_cnt: int, vtype: torch.dtype, ctx: Received
) -> tuple[Tensor, Tensor]:
    """The third generation's allocation callback."""
    ctx.ibuf, ctx.vbuf = torch.empty(i_cnt, dtype=itype), torch.empty(v_cnt, dtype=vtype)
    return ctx.ibuf, ctx.vbuf


def run_event(data: Data, comm: event.Communicator, itype: str, vtype: str, reduction: str) -> None:
    """The third: either callback, the second call after the first one."""
    calls: list[tuple[str, Received]] = []
    deps: list[event.Event] = []
    for name, function in (("completion_fn", completion_fn), ("alloc_fn", alloc_fn)):
        received = Received()
        attr = event.create_sparse_allreduce_attr(fn_ctx=received, **{name: function})
        made = event.sparse_allreduce(
            data.send_ibuf, data.send_ibuf.numel(), data.send_vbuf, data.send_vbuf.numel(),
            None, 0, None, 0, itype, vtype, reduction, comm, None, attr, deps[-1:],
        )  # fmt: skip
        deps.append(made)
        calls.append((name, received))
    for (name, received), made in zip(calls, deps, strict=True):
        made.wait()
        data.check(f"event, {name}", received.ibuf, received.vbuf)


def test_all(comm: event.Communicator) -> int:
    """Run every combination; return their number."""
    combinations = [(itype, vtype, "sum") for itype in INDEX_TYPES for vtype in VALUE_TYPES]
    combinations += [("int64", vtype, "max") for vtype in VALUE_TYPES]
    for itype, vtype, reduction in combinations:
        data = prep_data(comm, itype, vtype, reduction)
        run_request(data, itype, vtype, reduction)
        run_callback(data, itype, vtype, reduction)
        run_event(data, comm, itype, vtype, reduction)
    return len(combinations)


def main() -> None:
    with weft.init():
        comm = event.create_communicator()
        count = test_all(comm)
        if comm.rank() == 0:
            print(f"{count} combinations of types and reductions on {comm.size()} ranks")
            print("PASSED")


if __name__ == "__main__":
    main()
