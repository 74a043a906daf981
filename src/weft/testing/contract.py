"""The tests that every group must pass: a pytest class, from which a test of a group inherits.

```python
class TestMyGroup(GroupContract):
    @pytest.fixture
    def ranks(self):
        def ranks(size, body, *args, timeout=20.0):
            ...  # run body(group, *args) on each of `size` new ranks, one group each
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

from ..base.errors import WireError
from ..base.pace import patient
from ..group.group import Group
from ..group.pending import Pending
from ..schedules import dense_all_reduce
from .clauses import COMBINE

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = (*_FLOATS, *_INTS, torch.bool)
_LARGE = 1 << 20  # floats, of more than goes at once
_SLACK = 3.0  # seconds that a wait may exceed its deadline, because the machine is busy


_Body = TypeVar("_Body", bound=Callable[[Group], object])
_CASES: list[Any] = []


def _on(*sizes: int, **options: float) -> Callable[[_Body], _Body]:
    """Register a body as a test at these sizes. It must return the same on all ranks."""

    def register(body: _Body) -> _Body:
        for size in sizes:
            _CASES.append(pytest.param(size, body, options, id=f"{body.__name__}-{size}"))
        return body

    return register


@_on(1, 2, 3, 4, 7, 8)
def exchange(group: Group) -> None:
    """Every rank sends to every other rank, in every dtype."""
    assert sorted([group.rank, *group.peers]) == list(range(group.size))
    for dtype in _DTYPES:
        sent = [(peer, _data(group.rank, peer, dtype)) for peer in group.peers]
        expected = [_data(peer, group.rank, dtype) for peer in group.peers]
        places = [torch.empty_like(each) for each in expected]
        pending = group.post(sent, list(zip(group.peers, places, strict=True)))
        got = pending.wait()
        assert [id(each) for each in got] == [id(each) for each in places]
        for mine, right in zip(places, expected, strict=True):
            assert torch.equal(mine, right), f"{dtype} arrived changed"
        pending.release()


@_on(2)
def memory_under_way(group: Group) -> None:
    """A message keeps its memory, whatever other memory its tensors get while it is under way."""
    (peer,) = group.peers

    def give_data(tensor: Tensor) -> None:
        tensor.data = torch.zeros(3)

    def set_storage(tensor: Tensor) -> None:
        tensor.set_(torch.zeros(_LARGE + 9).untyped_storage())

    for change in (give_data, set_storage):
        given, place = torch.full((_LARGE,), 1.0 + group.rank), torch.zeros(_LARGE)
        kept = place.detach()
        pending = group.post([(peer, given)], [(peer, place)])
        for tensor in (given, place):
            change(tensor)
        pending.wait()
        pending.release()
        assert kept.eq(1 + peer).all(), f"a message changed by {change.__name__}"


@_on(3)
def keep_order(group: Group) -> None:
    """Messages between two ranks keep their order, in whatever order one waits for them."""
    counts = range(10)
    sent = [[_number(100 * group.rank + 10 * i + j) for j in counts] for i in counts]
    posts = []
    for row in sent:
        sends = [(peer, each) for each in row for peer in group.peers]
        places = [(peer, _number(0)) for _ in row for peer in group.peers]
        posts.append(group.post(sends, places))
    for i in reversed(counts):  # waiting is not bound to the order of posting
        got = [int(each) for each in posts[i].wait()]
        assert got == [100 * peer + 10 * i + j for j in counts for peer in group.peers]


@_on(2)
def channels(group: Group) -> None:
    """A message on one channel does not wait for one on another channel."""
    peer = 1 - group.rank
    if group.rank == 0:
        second = group.post([(peer, _number(2))], channel=2)
        first = group.post([(peer, _number(1))])
    else:
        first = group.post((), [(peer, _number(0))])
        assert first.wait()[0].item() == 1  # the other channel has nowhere to go yet
        second = group.post((), [(peer, _number(0))], channel=2)
        assert second.wait()[0].item() == 2
    first.wait()
    second.wait()


@_on(2)
def shorter(group: Group) -> None:
    """A message may be shorter than the size of its receive."""
    peer = 1 - group.rank
    for length in (1, 5, 4095):
        sent = torch.arange(length, dtype=torch.int32) + group.rank
        right = torch.arange(length, dtype=torch.int32) + peer
        pending = group.post([(peer, sent)], [(peer, 20_000)])
        (view,) = pending.wait()
        assert view.dtype == torch.uint8
        assert torch.equal(view[: 4 * length].view(torch.int32), right)
        pending.release()


@_on(2)
def empty(group: Group) -> None:
    """Empty messages arrive."""
    peer = 1 - group.rank
    nothing = torch.empty(0)
    pending = group.post([(peer, nothing)] * 3, [(peer, torch.empty(0)), (peer, 64), (peer, 0)])
    first, _, last = pending.wait()
    assert first.numel() == last.numel() == 0
    pending.release()
    assert group.post().wait() == []
    got = group.post([(peer, _number(7))], [(peer, _number(0))]).wait()
    assert got[0].item() == 7  # nothing was left behind


@_on(2)
def leases(group: Group) -> None:
    """Leased memory can be sent; views that were received stay valid until they are released."""
    peer = 1 - group.rank
    for round in range(3):
        with group.lease(3000) as memory:
            assert memory.numel() == 3000
            memory.fill_(10 * round + group.rank)
            pending = group.post([(peer, memory)], [(peer, 3000)])
            view = pending.wait()[0]
            assert pending.wait()[0].data_ptr() == view.data_ptr()
            assert set(view.tolist()) == {10 * round + peer}
        pending.release()
        pending.release()


@_on(2)
def many(group: Group) -> None:
    """Many messages may be on the wire at once."""
    peer = 1 - group.rank
    posts = [group.post([(peer, _number(i))], [(peer, _number(0))]) for i in range(500)]
    assert [int(each.wait()[0]) for each in posts] == list(range(500))


@_on(2)
def swap_large(group: Group) -> None:
    """Two ranks may send large messages to each other at the same time."""
    peer = 1 - group.rank
    count = 2_000_000
    sent = torch.arange(count, dtype=torch.float32) * (group.rank + 1)
    got = group.post([(peer, sent)], [(peer, torch.empty(count))]).wait()[0]
    assert torch.equal(got, torch.arange(count, dtype=torch.float32) * (peer + 1))


@_on(2)
def late(group: Group) -> None:
    """A receiver may post its receive long after the message was sent."""
    if group.rank == 0:
        group.post([(1, torch.arange(100_000))]).wait()
    else:
        time.sleep(0.2)
        got = group.post((), [(0, torch.empty(100_000, dtype=torch.int64))]).wait()[0]
        assert torch.equal(got, torch.arange(100_000))


@_on(2)
def mixed(group: Group) -> None:
    """Messages of any length, received before or after they are sent, into tensors or as views."""
    peer, lengths = 1 - group.rank, (1, 300_000, 7, 140_000, 0, 60_000, 300_000, 2)
    for early in (True, False):
        posts = []
        for turn in ("receive", "send") if early else ("send", "receive"):
            for number, length in enumerate(lengths):
                if turn == "send":
                    with group.lease(length) as memory:
                        mine = torch.full((length,), 10 * number + group.rank, dtype=torch.uint8)
                        sent = memory.copy_(mine) if number % 3 else mine
                        if early:
                            group.post([(peer, sent)], channel=1).wait()
                        else:
                            posts.append(group.post([(peer, sent.clone())], channel=1))
                    continue
                place = torch.empty(length, dtype=torch.uint8)
                posts.append(group.post((), [(peer, place if number % 2 else length)], channel=1))
        got = [view for pending in posts for view in pending.wait()]
        assert [len(view) for view in got] == list(lengths)
        for number, view in enumerate(got):
            assert set(view.tolist()) <= {10 * number + peer}
        for pending in posts:
            pending.release()


@_on(3)
def traffic(group: Group) -> None:
    """The group counts the messages and bytes that it sends, by peer."""
    group.traffic.reset()
    sent = [(peer, torch.zeros(10 + peer)) for peer in group.peers]
    group.post(sent, [(peer, 400) for peer in group.peers]).wait()
    assert group.traffic.messages == 2
    assert group.traffic.to == {peer: 4 * (10 + peer) for peer in group.peers}
    assert group.traffic.bytes == sum(group.traffic.to.values())


@_on(1, 2, 3, 8)
def gather_small(group: Group) -> None:
    """`small_all_gather` gives every rank the messages of all ranks."""
    cap = 40
    for round in range(5):
        length = 1 + (group.rank + round) % cap
        own = torch.full((length,), group.rank + 100, dtype=torch.uint8)
        own[0] = length
        pending = group.small_all_gather(own, cap)
        for rank, message in enumerate(pending.wait()):
            length = int(message[0])
            assert length == 1 + (rank + round) % cap
            assert message[1:length].tolist() == [rank + 100] * (length - 1)
        pending.release()


@_on(1, 2, 3, 4, 7)
def reduce_exactly(group: Group) -> None:
    """`dense_all_reduce` is exact for every dtype and op, on values that any order sums exactly."""
    for count in (0, 1, 1000, 40_000):
        for dtype in _DTYPES:
            parts = [_reducible(rank, count, dtype) for rank in range(group.size)]
            for op, combine in COMBINE.items():
                if dtype in _FLOATS and op.startswith("b"):
                    continue
                if dtype is torch.bool and op in ("sum", "prod"):
                    continue
                right = parts[0]
                for part in parts[1:]:
                    right = combine(right, part)
                mine = parts[group.rank].clone()
                pending = dense_all_reduce(group, mine, op)
                got = pending.wait()
                assert got[0] is mine
                assert torch.equal(mine, right), f"{op} of {count} {dtype} is wrong"
                pending.release()


@_on(2, 3, 7)
def reduce_floats(group: Group) -> list[bytes]:
    """`dense_all_reduce` of floats gives all ranks the same bits."""
    results = []
    for dtype in _FLOATS:
        parts = [
            torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(group.size)
        ]
        right = torch.stack([part.double() for part in parts]).sum(0)
        places = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.1)
        for op, divisor in (("sum", 1), ("avg", group.size)):
            mine = parts[group.rank].clone()
            dense_all_reduce(group, mine, op).wait()
            assert torch.allclose(mine.double(), right / divisor, atol=places, rtol=places)
            results.append(bytes(mine.view(torch.uint8).tolist()))
    return results


@_on(3)
def reduce_nan(group: Group) -> None:
    """`dense_all_reduce` propagates NaN."""
    for op in ("sum", "min", "max", "prod"):
        mine = torch.tensor([1.0, float("nan") if group.rank == 1 else 2.0, float("inf")])
        dense_all_reduce(group, mine, op).wait()
        assert mine.isnan().tolist() == [False, True, False]
        assert mine[2] == float("inf")


@_on(3)
def reduce_beside_messages(group: Group) -> None:
    """Reductions and messages may be on the wire at the same time."""
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    first = torch.full((5000,), float(group.rank))
    second = torch.full((3,), group.rank, dtype=torch.int64)
    message = group.post([(following, _number(group.rank))], [(before, 8)])
    reductions = [dense_all_reduce(group, first, "sum"), dense_all_reduce(group, second, "max")]
    for reduction in reductions:
        reduction.wait()
    assert message.wait()[0].view(torch.int64).item() == before
    assert set(first.tolist()) == {sum(range(group.size))}
    assert second.tolist() == [group.size - 1] * 3


@_on(1, 2, 5)
def parts(group: Group) -> None:
    """`split` makes independent groups of some of the ranks."""
    ranks = list(range(group.size))
    evens, twins = ranks[::-2], [group.split(ranks), group.split(ranks)]
    part = group.split(evens)
    assert (part is None) == (group.rank not in evens)
    if part is not None:
        assert (part.rank, part.size) == (evens.index(group.rank), len(evens))
        total = torch.tensor([group.rank])
        dense_all_reduce(part, total, "sum").wait()
        assert total.item() == sum(evens)
        exchange(part)
        part.close()
    # two groups of the same ranks, and their parent, do not receive each other's messages
    groups = [group, *(twin for twin in twins if twin is not None)]
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.size > 1:
        sends = [w.post([(following, _number(i))]) for i, w in enumerate(groups)]
        for i, w in reversed(list(enumerate(groups))):
            got = w.post((), [(before, _number(0))]).wait()[0]
            assert got.item() == i
        for pending in sends:
            pending.wait()
    for twin in groups[1:]:
        twin.close()
    exchange(group)


@_on(2, timeout=0.7)
def deadline(group: Group) -> None:
    """A wait for a rank that does nothing ends at the deadline, and names that rank."""
    if group.rank == 1:
        _sleep_until_broken(group)
        _is_broken(group, culprit=1)
        return
    timeout, began = group.timeout, time.monotonic()
    _breaks(group, lambda: group.post((), [(1, 8)]), culprit=1, match=r"rank 0: .*rank 1")
    assert timeout * 0.9 < time.monotonic() - began < timeout + patient(_SLACK)


@_on(4)
def absent(group: Group) -> None:
    """Each rank waits for the next, the last one sleeps: all ranks name the last one."""
    last = group.size - 1
    word = _number(0)
    if group.rank == last:
        group.post((), [(0, 8)]).wait()
        _sleep_until_broken(group)
        _is_broken(group, culprit=last)
        return
    tells = 0
    if group.rank == 0:  # gives up once the others wait, and the last one has begun to sleep
        group.post((), [(rank, 8) for rank in range(1, last)]).wait()
        group.set_timeout(patient(3.0))
        tells = last
    _breaks(group, lambda: group.post([(tells, word)], [(group.rank + 1, 8)]), culprit=last)


@_on(4)
def abort(group: Group) -> None:
    """An abort ends every wait, also those for other ranks, and names the rank that aborted."""
    others = [rank for rank in range(group.size) if rank != 1]
    if group.rank == 1:
        time.sleep(0.2)
        group.abort("out of memory")
        _is_broken(group, culprit=1)
    else:
        before = others[others.index(group.rank) - 1]
        awaits = functools.partial(group.post, (), [(before, 8)])
        _breaks(group, awaits, culprit=1, match="out of memory", at_once=True)


@_on(3)
def abort_reduction(group: Group) -> None:
    """An abort ends a reduction, and names the rank that aborted."""
    if group.rank == 2:
        time.sleep(0.2)
        group.abort("interrupted")
        _is_broken(group, culprit=2)
    else:
        reduces = functools.partial(dense_all_reduce, group, torch.ones(50_000), "sum")
        _breaks(group, reduces, culprit=2, match="interrupted", at_once=True)


@_on(3)
def left(group: Group) -> None:
    """A wait for a rank that closed its group ends at once, and names that rank."""
    if group.rank == 1:
        time.sleep(0.2)
        group.close()
    else:
        _breaks(group, lambda: group.post((), [(1, 8)]), culprit=1, at_once=True)


@_on(3)
def stay(group: Group) -> None:
    """When a rank has closed its group, the others can still send to each other."""
    if group.rank == 2:
        group.close()
        return
    time.sleep(0.3)
    peer = 1 - group.rank
    for _ in range(20):
        got = group.post([(peer, _number(group.rank))], [(peer, 8)]).wait()[0]
        assert got.view(torch.int64).item() == peer


@_on(2)
def closed(group: Group) -> None:
    """A closed group raises an error that says so; it may be closed twice."""
    exchange(group)
    group.close()
    group.close()
    for _ in range(2):
        with pytest.raises(WireError, match=rf"rank {group.rank}: .*closed"):
            group.post([(1 - group.rank, _number(1))]).wait()


def _breaks(
    group: Group,
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
    assert (caught.value.rank, caught.value.culprit) == (group.rank, culprit), str(caught.value)
    assert not at_once or time.monotonic() - began < group.timeout / 2
    _is_broken(group, culprit)


def _sleep_until_broken(group: Group) -> None:
    """Do nothing until the group is broken; the others may begin their wait late."""
    until = time.monotonic() + patient(30.0)
    with contextlib.suppress(WireError):
        while time.monotonic() < until:
            group.check()
            time.sleep(0.05)


def _is_broken(group: Group, culprit: int) -> None:
    """Check that every further use of the group raises the same error at once."""
    group.set_timeout(20.0)  # no pause of this thread is as long
    texts = set()
    for use in (group.post, functools.partial(dense_all_reduce, group, torch.ones(2), "sum")):
        began = time.monotonic()
        with pytest.raises(WireError) as caught:
            use().wait()
        assert time.monotonic() - began < group.timeout
        assert caught.value.rank == group.rank and caught.value.culprit == culprit
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


class GroupContract:
    """Inherit from it and define the fixture `ranks`, as the module's docstring shows.

    Each test runs a body on new ranks. Its name says the body and the number of ranks, as in
    `test_contract[exchange-4]`.
    """

    @pytest.fixture
    def ranks(self) -> Callable[..., list[Any]]:
        raise NotImplementedError("a test of a group says with the fixture ranks how to run ranks")

    @pytest.mark.parametrize(("size", "body", "options"), _CASES)
    def test_contract(
        self,
        ranks: Callable[..., list[Any]],
        size: int,
        body: Callable[[Group], object],
        options: dict[str, float],
    ) -> None:
        first, *others = ranks(size, body, **options)
        assert all(each == first for each in others)
