"""Models under DistributedDataParallel whose gradients travel in 16 bits."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft import ddp
from weft.bootstrap.init import init
from weft.comm import sync_grads
from weft.comm.rounding import narrowed
from weft.errors import WeftError
from weft.testing import run
from weft.wire.base import Wire


def on(size: int, body: Callable[[], Any]) -> Any:
    """Run a rank's program within `weft.init` in so many processes, which all tests share."""
    with tempfile.TemporaryDirectory() as folder:
        return run(size, _within, f"file://{folder}/meeting", body, on="processes")


def _within(wire: Wire, meeting: str, body: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DistributedDataParallel: one without a backward
        dist.init_process_group("gloo", meeting, rank=wire.rank, world_size=wire.size)
        try:
            with init(timeout=20):
                return body()
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3])
def test_dense_buckets_travel_in_the_wire_dtype_as_those_of_sync_grads_do(size: int) -> None:
    on(size, rounding)


def rounding() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for dtype, narrow, cap in (
        (torch.float32, torch.bfloat16, 25),
        (torch.float32, torch.float16, 0.02),  # MB: several buckets
        (torch.float64, torch.bfloat16, 25),
        (torch.float64, torch.float16, 0.02),
    ):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(70, 300), nn.Linear(300, 3)).to(dtype)
        synced = copy.deepcopy(model)
        ours = DistributedDataParallel(model, bucket_cap_mb=cap)
        state = ddp.register(ours, wire_dtype=narrow)
        batch = torch.randn(4, 70, generator=torch.Generator().manual_seed(me)).to(dtype)
        for step in range(3):
            for wrapped in (ours, synced):
                wrapped.zero_grad()
                before = state.wire.traffic.bytes
                wrapped(batch + step).exp().sum().backward()
                if wrapped is ours:
                    sent = state.wire.traffic.bytes - before
            rounded = [narrowed(p.grad, narrow).float() for p in synced.parameters()]
            sync_grads(synced, wire_dtype=narrow)
            for mine, other, sent_as in zip(
                ours.parameters(), synced.parameters(), rounded, strict=True
            ):
                parts = [torch.empty_like(sent_as) for _ in range(size)]
                dist.all_gather(parts, sent_as)
                wanted = (sum(parts[1:], parts[0]) / size).to(narrow).to(dtype)
                assert torch.equal(mine.grad, other.grad) and torch.equal(mine.grad, wanted)
            in_full = sum(each.grad.nbytes for each in synced.parameters()) * (size - 1)
            assert sent <= in_full * narrow.itemsize / dtype.itemsize * 1.05, (sent, in_full, cap)


def test_who_disagrees_on_the_wire_dtype_is_named_on_every_rank() -> None:
    texts = on(3, disagreeing)
    assert len(set(texts)) == 1
    assert "ranks differ in wire_dtype" in texts[0][0] and "rank 1 has torch.float16" in texts[0][0]
    assert texts[0][1].startswith("rank 2: wire_dtype is float16: pass torch.bfloat16 or")
    assert texts[0][2].startswith(
        "rank 0: register takes a DistributedDataParallel model, this is Linear: wrap"
    )


def disagreeing() -> tuple[str, ...]:
    me, texts = dist.get_rank(), []
    ours = DistributedDataParallel(nn.Linear(70, 300))
    for given, wire_dtype in (
        (ours, torch.float16 if me == 1 else None),
        (ours, "float16" if me == 2 else torch.float16),
        (ours.module if me == 0 else ours, None),
    ):
        with pytest.raises(WeftError) as caught:
            ddp.register(given, wire_dtype=wire_dtype)
        texts.append(str(caught.value))
    with pytest.raises(AttributeError):
        ddp.register(ours, wire_dtype=torch.float16).wire_dtype = None
    ours(torch.ones(1, 70)).sum().backward()
    assert ours.module.bias.grad.eq(1).all()
    return tuple(texts)


def test_a_state_made_by_hand_compares_the_wire_dtype_in_backward() -> None:
    assert len(set(on(2, by_hand))) == 1


def by_hand() -> str:
    ours = DistributedDataParallel(nn.Linear(70, 300))
    wrong = torch.float16 if dist.get_rank() else torch.bfloat16
    ours.register_comm_hook(ddp.State(wire_dtype=wrong), ddp.hook)
    for _ in range(2):
        with pytest.raises(WeftError, match="ranks differ in wire_dtype") as caught:
            ours(torch.ones(1, 70)).sum().backward()
    return str(caught.value).replace("(call 1", "(call 2")
