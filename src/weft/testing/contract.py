"""What every wire must do: a pytest class that a test of a wire inherits.

```python
class TestMyWire(WireContract):
    @pytest.fixture
    def ranks(self):
        def ranks(size, body, *args, timeout=20.0):
            ...  # run body(wire, *args) on each of `size` new ranks, one wire each
        return ranks
```
`functools.partial(weft.testing.run, on="threads")` is such a function. The bodies below are at the
top of this module so that other processes can find them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ..errors import WireError
from ..wire.base import Pending, Wire, peers
from .pace import patient

Ranks = Callable[..., list[Any]]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = (*_FLOATS, *_INTS, torch.bool)
_SLACK = 3.0  # seconds that a busy machine may take on top of a deadline

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class WireContract:
    """Inherit it, and give it the fixture `ranks`: see the module."""

    @pytest.fixture
    def ranks(self) -> Ranks:
        raise NotImplementedError("a test of a wire says with the fixture ranks how to run ranks")

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
    def test_everybody_sends_to_everybody(self, ranks: Ranks, size: int) -> None:
        ranks(size, exchange)

    def test_messages_of_a_pair_keep_their_order(self, ranks: Ranks) -> None:
        ranks(3, keep_order)

    def test_channels_are_independent(self, ranks: Ranks) -> None:
        ranks(2, channels)

    def test_a_message_may_be_shorter_than_its_receive(self, ranks: Ranks) -> None:
        ranks(2, shorter)

    def test_empty_messages_arrive(self, ranks: Ranks) -> None:
        ranks(2, empty)

    def test_leased_views_come_back(self, ranks: Ranks) -> None:
        ranks(2, leases)

    def test_many_messages_may_be_under_way(self, ranks: Ranks) -> None:
        ranks(2, many)

    def test_large_messages_cross(self, ranks: Ranks) -> None:
        ranks(2, swap_large)

    def test_a_receiver_may_be_late(self, ranks: Ranks) -> None:
        ranks(2, late)

    def test_long_and_short_messages_keep_their_order(self, ranks: Ranks) -> None:
        ranks(2, mixed)

    def test_traffic_is_counted(self, ranks: Ranks) -> None:
        ranks(3, traffic)

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    def test_small_all_gather(self, ranks: Ranks, size: int) -> None:
        ranks(size, gather_small)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
    def test_dense_all_reduce_of_every_dtype_and_op(self, ranks: Ranks, size: int) -> None:
        ranks(size, reduce_exactly)

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_dense_all_reduce_gives_all_ranks_the_same_bits(self, ranks: Ranks, size: int) -> None:
        results = ranks(size, reduce_floats)
        for result in results[1:]:
            assert result == results[0]

    def test_dense_all_reduce_carries_nan(self, ranks: Ranks) -> None:
        ranks(3, reduce_nan)

    def test_reductions_and_messages_may_be_under_way_together(self, ranks: Ranks) -> None:
        ranks(3, reduce_beside_messages)

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_parts_are_wires_of_their_own(self, ranks: Ranks, size: int) -> None:
        ranks(size, parts)

    def test_a_wait_ends_at_its_deadline(self, ranks: Ranks) -> None:
        ranks(2, deadline, timeout=0.7)

    def test_the_rank_that_all_wait_for_is_named(self, ranks: Ranks) -> None:
        ranks(4, absent, timeout=0.7)

    def test_abort_ends_every_wait_and_names_the_rank(self, ranks: Ranks) -> None:
        ranks(4, abort)

    def test_abort_ends_a_reduction(self, ranks: Ranks) -> None:
        ranks(3, abort_reduction)

    def test_a_rank_that_left_is_named(self, ranks: Ranks) -> None:
        ranks(3, left)

    def test_those_that_stay_go_on(self, ranks: Ranks) -> None:
        ranks(3, stay)

    def test_a_closed_wire_says_so(self, ranks: Ranks) -> None:
        ranks(2, closed)


def exchange(wire: Wire) -> None:
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


def keep_order(wire: Wire) -> None:
    counts = range(10)
    sent = [[_number(100 * wire.rank + 10 * i + j) for j in counts] for i in counts]
    posts = []
    for row in sent:
        sends = [(peer, each) for each in row for peer in peers(wire)]
        places = [(peer, torch.empty(1, dtype=torch.int64)) for _ in row for peer in peers(wire)]
        posts.append(wire.post(sends, places))
    for i in reversed(counts):  # waiting is not bound to the order of posting
        got = [int(each) for each in posts[i].wait()]
        assert got == [100 * peer + 10 * i + j for j in counts for peer in peers(wire)]


def channels(wire: Wire) -> None:
    peer = 1 - wire.rank
    if wire.rank == 0:
        second = wire.post([(peer, _number(2))], channel=2)
        first = wire.post([(peer, _number(1))])
    else:
        first = wire.post((), [(peer, torch.empty(1, dtype=torch.int64))])
        assert first.wait()[0].item() == 1  # the other channel has nowhere to go yet
        second = wire.post((), [(peer, torch.empty(1, dtype=torch.int64))], channel=2)
        assert second.wait()[0].item() == 2
    first.wait()
    second.wait()


def shorter(wire: Wire) -> None:
    peer = 1 - wire.rank
    for length in (1, 5, 4095):
        sent = torch.arange(length, dtype=torch.int32) + wire.rank
        right = torch.arange(length, dtype=torch.int32) + peer
        place = torch.empty(5000, dtype=torch.int32)
        pending = wire.post([(peer, sent), (peer, sent)], [(peer, place), (peer, 20_000)])
        whole, view = pending.wait()
        assert torch.equal(whole[:length], right)
        assert view.dtype == torch.uint8 and view.numel() == 20_000
        assert torch.equal(view[: 4 * length].view(torch.int32), right)
        pending.release()


def empty(wire: Wire) -> None:
    peer = 1 - wire.rank
    nothing = torch.empty(0)
    pending = wire.post([(peer, nothing)] * 3, [(peer, torch.empty(0)), (peer, 64), (peer, 0)])
    lengths = [each.numel() for each in pending.wait()]
    assert lengths == [0, 64, 0]
    pending.release()
    assert wire.post().wait() == []
    got = wire.post([(peer, _number(7))], [(peer, torch.empty(1, dtype=torch.int64))]).wait()
    assert got[0].item() == 7  # nothing was left behind


def leases(wire: Wire) -> None:
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


def many(wire: Wire) -> None:
    peer = 1 - wire.rank
    posts = [
        wire.post([(peer, _number(i))], [(peer, torch.empty(1, dtype=torch.int64))])
        for i in range(500)
    ]
    assert [int(each.wait()[0]) for each in posts] == list(range(500))


def swap_large(wire: Wire) -> None:
    peer = 1 - wire.rank
    count = 2_000_000
    sent = torch.arange(count, dtype=torch.float32) * (wire.rank + 1)
    got = wire.post([(peer, sent)], [(peer, torch.empty(count))]).wait()[0]
    assert torch.equal(got, torch.arange(count, dtype=torch.float32) * (peer + 1))


def late(wire: Wire) -> None:
    if wire.rank == 0:
        wire.post([(1, torch.arange(100_000))]).wait()
    else:
        time.sleep(0.2)
        got = wire.post((), [(0, torch.empty(100_000, dtype=torch.int64))]).wait()[0]
        assert torch.equal(got, torch.arange(100_000))


def mixed(wire: Wire) -> None:
    """Of any length, asked for before they are sent and after, into tensors and anywhere."""
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


def traffic(wire: Wire) -> None:
    wire.traffic.reset()
    sent = [(peer, torch.zeros(10 + peer)) for peer in peers(wire)]
    wire.post(sent, [(peer, 400) for peer in peers(wire)]).wait()
    assert wire.traffic.messages == 2
    assert wire.traffic.to == {peer: 4 * (10 + peer) for peer in peers(wire)}
    assert wire.traffic.bytes == sum(wire.traffic.to.values())


def gather_small(wire: Wire) -> None:
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


def reduce_exactly(wire: Wire) -> None:
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


def reduce_floats(wire: Wire) -> list[bytes]:
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


def reduce_nan(wire: Wire) -> None:
    for op in ("sum", "min", "max", "prod"):
        mine = torch.tensor([1.0, float("nan") if wire.rank == 1 else 2.0, float("inf")])
        wire.dense_all_reduce(mine, op).wait()
        assert mine.isnan().tolist() == [False, True, False]
        assert mine[2] == float("inf")


def reduce_beside_messages(wire: Wire) -> None:
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


def parts(wire: Wire) -> None:
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
    # two wires of the same ranks, and the one they come from, do not hear each other
    wires = [wire, *(twin for twin in twins if twin is not None)]
    following, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    if wire.size > 1:
        sends = [w.post([(following, _number(i))]) for i, w in enumerate(wires)]
        for i, w in reversed(list(enumerate(wires))):
            got = w.post((), [(before, torch.empty(1, dtype=torch.int64))]).wait()[0]
            assert got.item() == i
        for pending in sends:
            pending.wait()
    for twin in wires[1:]:
        twin.close()
    exchange(wire)


def deadline(wire: Wire) -> None:
    if wire.rank == 1:
        time.sleep(3 * wire.timeout)
        _verdict(wire, culprit=1)
        return
    began = time.monotonic()
    with pytest.raises(WireError, match=r"rank 0: .*rank 1") as caught:
        wire.post((), [(1, 8)]).wait()
    took = time.monotonic() - began
    assert caught.value.rank == 0 and caught.value.culprit == 1
    assert wire.timeout * 0.9 < took < wire.timeout + patient(_SLACK)
    _verdict(wire, culprit=1)


def absent(wire: Wire) -> None:
    """Each awaits the next; the last is asleep in its own code: none blames its neighbour."""
    last = wire.size - 1
    if wire.rank == last:
        time.sleep(2 * wire.timeout + 1)
    else:
        with pytest.raises(WireError) as caught:
            wire.post((), [(wire.rank + 1, 8)]).wait()
        assert caught.value.culprit == last, str(caught.value)
    _verdict(wire, culprit=last)


def abort(wire: Wire) -> None:
    if wire.rank == 1:
        time.sleep(0.2)
        wire.abort("out of memory")
    else:  # innocents that await each other
        others = [rank for rank in range(wire.size) if rank != 1]
        before = others[others.index(wire.rank) - 1]
        began = time.monotonic()
        with pytest.raises(WireError, match="out of memory") as caught:
            wire.post((), [(before, 8)]).wait()
        assert caught.value.culprit == 1
        assert time.monotonic() - began < wire.timeout / 2  # not the deadline ended it
    _verdict(wire, culprit=1)


def abort_reduction(wire: Wire) -> None:
    if wire.rank == 2:
        time.sleep(0.2)
        wire.abort("interrupted")
    else:
        with pytest.raises(WireError, match="interrupted"):
            wire.dense_all_reduce(torch.ones(50_000), "sum").wait()
    _verdict(wire, culprit=2)


def left(wire: Wire) -> None:
    if wire.rank == 1:
        time.sleep(0.2)
        wire.close()
        return
    began = time.monotonic()
    with pytest.raises(WireError) as caught:
        wire.post((), [(1, 8)]).wait()
    assert caught.value.culprit == 1, str(caught.value)
    assert time.monotonic() - began < wire.timeout / 2
    _verdict(wire, culprit=1)


def stay(wire: Wire) -> None:
    if wire.rank == 2:
        wire.close()
        return
    time.sleep(0.3)
    peer = 1 - wire.rank
    for _ in range(20):
        got = wire.post([(peer, _number(wire.rank))], [(peer, 8)]).wait()[0]
        assert got.view(torch.int64).item() == peer


def closed(wire: Wire) -> None:
    exchange(wire)
    wire.close()
    wire.close()
    for _ in range(2):
        with pytest.raises(WireError, match=rf"rank {wire.rank}: .*closed"):
            wire.post([(1 - wire.rank, _number(1))]).wait()


def _verdict(wire: Wire, culprit: int) -> None:
    """Every further use of a broken wire says at once what broke it."""
    texts = set()
    uses: list[Callable[[], Pending]] = [
        wire.post,
        lambda: wire.dense_all_reduce(torch.ones(2), "sum"),
    ]
    for use in uses:
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
    """What one rank sends to another, from their numbers alone; of a length that tells them too."""
    shape = (1 + source, 3 + target)
    return (torch.arange(shape[0] * shape[1]).view(shape) * 7 + source * 3 + target).to(dtype)


def _reducible(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small integers, so that every dtype reduces them exactly, in any order."""
    numbers = (torch.arange(count) * 5 + rank * 3) % (2 if dtype is torch.bool else 3)
    return numbers.to(dtype)
