"""The parts that schedules are made of: to make one sends nothing, to start it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.group.channels import SUMS
from weft.group.group import Group
from weft.sparse import run
from weft.sparse.call import Call
from weft.sparse.local_rows import LocalRows
from weft.sparse.owners import SparseReduceScatter
from weft.sparse.relay import Relay
from weft.sparse.request import Request
from weft.sparse.stream import IndexLists, Inflow, Ring
from weft.testing import run as run_on_threads

INDICES = torch.arange(4, dtype=torch.int32)


def lists(call: Call, own: LocalRows) -> Any:
    peers = call.group.peers
    return IndexLists(call, dict.fromkeys(peers, INDICES), peers)


def inflow(call: Call, own: LocalRows) -> Any:
    return Inflow(call, call.group.peers[0], 4)


def ring(call: Call, own: LocalRows) -> Any:
    memory = [torch.empty(4, 2) for _ in range(call.group.size)]
    return Ring(call, memory, SUMS, nbytes=4)


def relay(call: Call, own: LocalRows) -> Any:
    return Relay(call, [4] * call.group.size)


def scatter(call: Call, own: LocalRows) -> Any:
    return SparseReduceScatter(call, own, [0, 2, 4])


def posts(group: Group, made: Callable[[Call, LocalRows], Any]) -> tuple[int, int]:
    """What a part posts when it is made, and once it is started."""
    rows = weft.Rows(torch.arange(4), torch.ones(4, 2), 8)
    request = Request.of(rows, "sum", "auto", None)
    with run.begin(group, request, "parts", looks=True) as (own, call):
        posted: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call.group, "post", lambda *args: posted.append(args))
            part = made(call, own)
            before = len(posted)
            part.start()
        return before, len(posted)


@pytest.mark.parametrize("made", [lists, inflow, ring, relay, scatter])
def test_to_make_a_part_posts_nothing_and_to_start_it_does(
    made: Callable[[Call, LocalRows], Any],
) -> None:
    for before, after in run_on_threads(2, posts, made):
        assert before == 0 < after
