"""The tests that every wire must pass: a pytest class, from which a test of a wire inherits.

```python
class TestMyWire(WireContract):
    @pytest.fixture
    def ranks(self):
        def ranks(size, body, *args, timeout=20.0):
            ...  # run body(wire, *args) on each of `size` new ranks, one wire each
        return ranks
```
`functools.partial(weft.testing.run, on="threads")` is such a function. The bodies below are at the
top of this module, so that other processes can import them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ..errors import WireError
from ..wire.base import Pending, Wire, peers
from .pace import patient

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = (*_FLOATS, *_INTS, torch.bool)
_LARGE = 1 << 20  # floats, of more than goes at once
_SLACK = 3.0  # seconds that a wait may exceed its deadline, because the machine is busy

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

_Body = TypeVar("_Body", bound=Callable[[Wire], object])
_CASES: list[Any] = []


def _on(*sizes: int, **options: float) -> Callable[[_Body], _Body]:
    """Register a body as a test at these sizes. It must return the same on all ranks."""

    def register(body: _Body) -> _Body:
        for size in sizes:
            _CASES.append(pytest.param(size, body, options, id=f"{body.__name__}-{size}"))
        return body

    return register


@_on(1, 2, 3, 4, 7, 8)
def exchange(wire: Wire) -> None:
    """Every rank sends to every other rank, in every dtype."""
    assert sorted([wire.rank, *peers(wire)]) == list(range(wire.size))
    for dtype in _DTYPES:
        sent = [(peer, _data(wire.rank, peer, dtype)) for peer in peers(wire)]
        expected = [_data(peer, wire.rank, dtype) for peer in peers(wire)]
        places = [torch.empty_like(each) for each in expected]
        pending = wire.post(sent, list(zip(peers(wire), places, strict=True)))
        got = pending.wait()
        assert [id(each) for each in got] == [id(each) for each in places]
        for mine, right in zip(places, expected, strict=True):
            assert torch.equal(mine, right), f"{dtype} arrived changed"
        pending.release()


@_on(2)
def memory_under_way(wire: Wire) -> None:
    """A message keeps its memory, whatever other memory its tensors get while it is under way."""
    (peer,) = peers(wire)

    def give_data(tensor: Tensor) -> None:
        tensor.data = torch.zeros(3)

    def set_storage(tensor: Tensor) -> None:
        tensor.set_(torch.zeros(_LARGE + 9).untyped_storage())

    def free_storage(tensor: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # which is fine, too: it stays as it is
            tensor.untyped_storage().resize_(0)

    for change in (give_data, set_storage, free_storage):
        given, place = torch.full((_LARGE,), 1.0 + wire.rank), torch.zeros(_LARGE)
        kept = place.detach()
        pending = wire.post([(peer, given)], [(peer, place)])
        for tensor in (given, place):
            change(tensor)
        pending.wait()
        pending.release()
        assert kept.untyped_storage().nbytes() == 4 * _LARGE, "its memory was freed"
        assert kept.eq(1 + peer).all(), f"a message changed by {change.__name__}"


@_on(3)
def keep_order(wire: Wire) -> None:
    """Messages between two ranks keep their order, in whatever order one waits for them."""
    counts = range(10)
    sent = [[_number(100 * wire.rank + 10 * i + j) for j in counts] for i in counts]
    posts = []
    for row in sent:
        sends = [(peer, each) for each in row for peer in peers(wire)]
        places = [(peer, _number(0)) for _ in row for peer in peers(wire)]
        posts.append(wire.post(sends, places))
    for i in reversed(counts):  # waiting is not bound to the order of posting
        got = [int(each) for each in posts[i].wait()]
        assert got == [100 * peer + 10 * i + j for j in counts for peer in peers(wire)]


@_on(2)
def channels(wire: Wire) -> None:
    """A message on one channel does not wait for one on another channel."""
    peer = 1 - wire.rank
    if wire.rank == 0:
        second = wire.post([(peer, _number(2))], channel=2)
        first = wire.post([(peer, _number(1))])
    else:
        first = wire.post((), [(peer, _number(0))])
        assert first.wait()[0].item() == 1  # the other channel has nowhere to go yet
        second = wire.post((), [(peer, _number(0))], channel=2)
        assert second.wait()[0].item() == 2
    first.wait()
    second.wait()


@_on(2)
def shorter(wire: Wire) -> None:
    """A message may be shorter than the size of its receive."""
    peer = 1 - wire.rank
    for length in (1, 5, 4095):
        sent = torch.arange(length, dtype=torch.int32) + wire.rank
        right = torch.arange(length, dtype=torch.int32) + peer
        pending = wire.post([(peer, sent)], [(peer, 20_000)])
        (view,) = pending.wait()
        assert view.dtype == torch.uint8
        assert torch.equal(view[: 4 * length].view(torch.int32), right)
        pending.release()


@_on(2)
def empty(wire: Wire) -> None:
    """Empty messages arrive."""
    peer = 1 - wire.rank
    nothing = torch.empty(0)
    pending = wire.post([(peer, nothing)] * 3, [(peer, torch.empty(0)), (peer, 64), (peer, 0)])
    first, _, last = pending.wait()
    assert first.numel() == last.numel() == 0
    pending.release()
    assert wire.post().wait() == []
    got = wire.post([(peer, _number(7))], [(peer, _number(0))]).wait()
    assert got[0].item() == 7  # nothing was left behind


@_on(2)
def leases(wire: Wire) -> None:
    """Leased memory can be sent; views that were received stay valid until they are released."""
    peer = 1 - wire.rank
    for round in range(3):
        with wire.lease(3000) as memory:
            assert memory.numel() == 3000
            memory.fill_(10 * round + wire.rank)
            pending = wire.post([(peer, memory)], [(peer, 3000)])
            view = pending.wait()[0]
            assert pending.wait()[0].data_ptr() == view.data_ptr()
            assert set(view.tolist()) == {10 * round + peer}
        pending.release()
        pending.release()


@_on(2)
def many(wire: Wire) -> None:
    """Many messages may be on the wire at once."""
    peer = 1 - wire.rank
    posts = [wire.post([(peer, _number(i))], [(peer, _number(0))]) for i in range(500)]
    assert [int(each.wait()[0]) for each in posts] == list(range(500))


@_on(2)
def swap_large(wire: Wire) -> None:
    """Two ranks may send large messages to each other at the same time."""
    peer = 1 - wire.rank
    count = 2_000_000
    sent = torch.arange(count, dtype=torch.float32) * (wire.rank + 1)
    got = wire.post([(peer, sent)], [(peer, torch.empty(count))]).wait()[0]
    assert torch.equal(got, torch.arange(count, dtype=torch.float32) * (peer + 1))


@_on(2)
def late(wire: Wire) -> None:
    """A receiver may post its receive long after the message was sent."""
    if wire.rank == 0:
        wire.post([(1, torch.arange(100_000))]).wait()
    else:
        time.sleep(0.2)
        got = wire.post((), [(0, torch.empty(100_000, dtype=torch.int64))]).wait()[0]
        assert torch.equal(got, torch.arange(100_000))


@_on(2)
def mixed(wire: Wire) -> None:
    """Messages of any length, received before or after they are sent, into tensors or as views."""
    peer, lengths = 1 - wire.rank, (1, 300_000, 7, 140_000, 0, 60_000, 300_000, 2)
    for early in (True, False):
        posts = []
        for turn in ("receive", "send") if early else ("send", "receive"):
            for number, length in enumerate(lengths):
                if turn == "send":
                    with wire.lease(length) as memory:
                        mine = torch.full((length,), 10 * number + wire.rank, dtype=torch.uint8)
                        sent = memory.copy_(mine) if number % 3 else mine
                        if early:
                            wire.post([(peer, sent)], channel=1).wait()
                        else:
                            posts.append(wire.post([(peer, sent.clone())], channel=1))
                    continue
                place = torch.empty(length, dtype=torch.uint8)
                posts.append(wire.post((), [(peer, place if number % 2 else length)], channel=1))
        got = [view for pending in posts for view in pending.wait()]
        assert [len(view) for view in got] == list(lengths)
        for number, view in enumerate(got):
            assert set(view.tolist()) <= {10 * number + peer}
        for pending in posts:
            pending.release()


@_on(3)
def traffic(wire: Wire) -> None:
    """The wire counts the messages and bytes that it sends, by peer."""
    wire.traffic.reset()
    sent = [(peer, torch.zeros(10 + peer)) for peer in peers(wire)]
    wire.post(sent, [(peer, 400) for peer in peers(wire)]).wait()
    assert wire.traffic.messages == 2
    assert wire.traffic.to == {peer: 4 * (10 + peer) for peer in peers(wire)}
    assert wire.traffic.bytes == sum(wire.traffic.to.values())


@_on(1, 2, 3, 8)
def gather_small(wire: Wire) -> None:
    """`small_all_gather` gives every rank the messages of all ranks."""
    cap = 40
    for round in range(5):
        length = 1 + (wire.rank + round) % cap
        own = torch.full((length,), wire.rank + 100, dtype=torch.uint8)
        own[0] = length
        pending = wire.small_all_gather(own, cap)
        for rank, message in enumerate(pending.wait()):
            length = int(message[0])
            assert length == 1 + (rank + round) % cap
            assert message[1:length].tolist() == [rank + 100] * (length - 1)
        pending.release()


@_on(1, 2, 3, 4, 7)
def reduce_exactly(wire: Wire) -> None:
    """`dense_all_reduce` is exact for every dtype and op, on values that any order sums exactly."""
    for count in (0, 1, 1000, 40_000):
        for dtype in _DTYPES:
            parts = [_reducible(rank, count, dtype) for rank in range(wire.size)]
            for op, combine in _COMBINE.items():
                if dtype in _FLOATS and op.startswith("b"):
                    continue
                if dtype is torch.bool and op in ("sum", "prod"):
                    continue
                right = parts[0]
                for part in parts[1:]:
                    right = combine(right, part)
                mine = parts[wire.rank].clone()
                pending = wire.dense_all_reduce(mine, op)
                got = pending.wait()
                assert got[0] is mine
                assert torch.equal(mine, right), f"{op} of {count} {dtype} is wrong"
                pending.release()


@_on(2, 3, 7)
def reduce_floats(wire: Wire) -> list[bytes]:
    """`dense_all_reduce` of floats gives all ranks the same bits."""
    results = []
    for dtype in _FLOATS:
        parts = [
            torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(wire.size)
        ]
        right = torch.stack([part.double() for part in parts]).sum(0)
        places = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.1)
        for op, divisor in (("sum", 1), ("avg", wire.size)):
            mine = parts[wire.rank].clone()
            wire.dense_all_reduce(mine, op).wait()
            assert torch.allclose(mine.double(), right / divisor, atol=places, rtol=places)
            results.append(bytes(mine.view(torch.uint8).tolist()))
    return results


@_on(3)
def reduce_nan(wire: Wire) -> None:
    """`dense_all_reduce` propagates NaN."""
    for op in ("sum", "min", "max", "prod"):
        mine = torch.tensor([1.0, float("nan") if wire.rank == 1 else 2.0, float("inf")])
        wire.dense_all_reduce(mine, op).wait()
        assert mine.isnan().tolist() == [False, True, False]
        assert mine[2] == float("inf")


@_on(3)
def reduce_beside_messages(wire: Wire) -> None:
    """Reductions and messages may be on the wire at the same time."""
    following, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    first = torch.full((5000,), float(wire.rank))
    second = torch.full((3,), wire.rank, dtype=torch.int64)
    message = wire.post([(following, _number(wire.rank))], [(before, 8)])
    reductions = [wire.dense_all_reduce(first, "sum"), wire.dense_all_reduce(second, "max")]
    for reduction in reductions:
        reduction.wait()
    assert message.wait()[0].view(torch.int64).item() == before
    assert set(first.tolist()) == {sum(range(wire.size))}
    assert second.tolist() == [wire.size - 1] * 3


@_on(1, 2, 5)
def parts(wire: Wire) -> None:
    """`sub` makes independent wires of some of the ranks."""
    ranks = list(range(wire.size))
    evens, twins = ranks[::-2], [wire.sub(ranks), wire.sub(ranks)]
    part = wire.sub(evens)
    assert (part is None) == (wire.rank not in evens)
    if part is not None:
        assert (part.rank, part.size) == (evens.index(wire.rank), len(evens))
        total = torch.tensor([wire.rank])
        part.dense_all_reduce(total, "sum").wait()
        assert total.item() == sum(evens)
        exchange(part)
        part.close()
    # two wires of the same ranks, and their parent, do not receive each other's messages
    wires = [wire, *(twin for twin in twins if twin is not None)]
    following, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    if wire.size > 1:
        sends = [w.post([(following, _number(i))]) for i, w in enumerate(wires)]
        for i, w in reversed(list(enumerate(wires))):
            got = w.post((), [(before, _number(0))]).wait()[0]
            assert got.item() == i
        for pending in sends:
            pending.wait()
    for twin in wires[1:]:
        twin.close()
    exchange(wire)


@_on(2, timeout=0.7)
def deadline(wire: Wire) -> None:
    """A wait for a rank that does nothing ends at the deadline, and names that rank."""
    if wire.rank == 1:
        time.sleep(3 * wire.timeout)
        _is_broken(wire, culprit=1)
        return
    began = time.monotonic()
    _breaks(wire, lambda: wire.post((), [(1, 8)]), culprit=1, match=r"rank 0: .*rank 1")
    assert wire.timeout * 0.9 < time.monotonic() - began < wire.timeout + patient(_SLACK)


@_on(4, timeout=0.7)
def absent(wire: Wire) -> None:
    """Each rank waits for the next, the last one sleeps: all ranks name the last one."""
    last = wire.size - 1
    if wire.rank == last:
        time.sleep(2 * wire.timeout + 1)
        _is_broken(wire, culprit=last)
    else:
        _breaks(wire, lambda: wire.post((), [(wire.rank + 1, 8)]), culprit=last)


@_on(4)
def abort(wire: Wire) -> None:
    """An abort ends every wait, also those for other ranks, and names the rank that aborted."""
    others = [rank for rank in range(wire.size) if rank != 1]
    if wire.rank == 1:
        time.sleep(0.2)
        wire.abort("out of memory")
        _is_broken(wire, culprit=1)
    else:
        before = others[others.index(wire.rank) - 1]
        awaits = functools.partial(wire.post, (), [(before, 8)])
        _breaks(wire, awaits, culprit=1, match="out of memory", at_once=True)


@_on(3)
def abort_reduction(wire: Wire) -> None:
    """An abort ends a reduction, and names the rank that aborted."""
    if wire.rank == 2:
        time.sleep(0.2)
        wire.abort("interrupted")
        _is_broken(wire, culprit=2)
    else:
        reduces = functools.partial(wire.dense_all_reduce, torch.ones(50_000), "sum")
        _breaks(wire, reduces, culprit=2, match="interrupted", at_once=True)


@_on(3)
def left(wire: Wire) -> None:
    """A wait for a rank that closed its wire ends at once, and names that rank."""
    if wire.rank == 1:
        time.sleep(0.2)
        wire.close()
    else:
        _breaks(wire, lambda: wire.post((), [(1, 8)]), culprit=1, at_once=True)


@_on(3)
def stay(wire: Wire) -> None:
    """When a rank has closed its wire, the others can still send to each other."""
    if wire.rank == 2:
        wire.close()
        return
    time.sleep(0.3)
    peer = 1 - wire.rank
    for _ in range(20):
        got = wire.post([(peer, _number(wire.rank))], [(peer, 8)]).wait()[0]
        assert got.view(torch.int64).item() == peer


@_on(2)
def closed(wire: Wire) -> None:
    """A closed wire raises an error that says so; it may be closed twice."""
    exchange(wire)
    wire.close()
    wire.close()
    for _ in range(2):
        with pytest.raises(WireError, match=rf"rank {wire.rank}: .*closed"):
            wire.post([(1 - wire.rank, _number(1))]).wait()


def _breaks(
    wire: Wire,
    use: Callable[[], Pending],
    *,
    culprit: int,
    match: str | None = None,
    at_once: bool = False,
) -> None:
    """Check that a wait raises, naming `culprit`; with `at_once`, long before the deadline."""
    began = time.monotonic()
    with pytest.raises(WireError, match=match) as caught:
        use().wait()
    assert (caught.value.rank, caught.value.culprit) == (wire.rank, culprit), str(caught.value)
    assert not at_once or time.monotonic() - began < wire.timeout / 2
    _is_broken(wire, culprit)


def _is_broken(wire: Wire, culprit: int) -> None:
    """Check that every further use of the wire raises the same error at once."""
    texts = set()
    for use in (wire.post, functools.partial(wire.dense_all_reduce, torch.ones(2), "sum")):
        began = time.monotonic()
        with pytest.raises(WireError) as caught:
            use().wait()
        assert time.monotonic() - began < wire.timeout
        assert caught.value.rank == wire.rank and caught.value.culprit == culprit
        texts.add(str(caught.value))
    assert len(texts) == 1, texts


def _number(value: int) -> Tensor:
    return torch.tensor([value])


def _data(source: int, target: int, dtype: torch.dtype) -> Tensor:
    """What rank `source` sends to rank `target`: values and shape follow from the two numbers."""
    shape = (1 + source, 3 + target)
    return (torch.arange(shape[0] * shape[1]).view(shape) * 7 + source * 3 + target).to(dtype)


def _reducible(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small integers, which every dtype reduces exactly in any order."""
    numbers = (torch.arange(count) * 5 + rank * 3) % (2 if dtype is torch.bool else 3)
    return numbers.to(dtype)


class WireContract:
    """Inherit from it and define the fixture `ranks`, as the module's docstring shows.

    Each test runs a body on new ranks. Its name says the body and the number of ranks, as in
    `test_contract[exchange-4]`.
    """

    @pytest.fixture
    def ranks(self) -> Callable[..., list[Any]]:
        raise NotImplementedError("a test of a wire says with the fixture ranks how to run ranks")

    @pytest.mark.parametrize(("size", "body", "options"), _CASES)
    def test_contract(
        self,
        ranks: Callable[..., list[Any]],
        size: int,
        body: Callable[[Wire], object],
        options: dict[str, float],
    ) -> None:
        first, *others = ranks(size, body, **options)
        assert all(each == first for each in others)
