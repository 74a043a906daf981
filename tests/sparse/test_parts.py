"""The parts that schedules are made of: to make one sends nothing, to start it does."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.group.channels import SUMS
from weft.sparse import run
from weft.sparse.owners import SparseReduceScatter
from weft.sparse.relay import Relay
from weft.sparse.request import Request
from weft.sparse.stream import IndexLists, Inflow, Ring
from weft.testing import run as run_on_threads

INDICES = torch.arange(4, dtype=torch.int32)


def lists(call, own):
    group = call.group
    return IndexLists(call, dict.fromkeys(range(group.size), INDICES), group.peers)


def inflow(call, own):
    return Inflow(call, call.group.peers[0], 4)


def ring(call, own):
    memory = [torch.empty(4, 2) for _ in range(call.group.size)]
    return Ring(call, memory, SUMS, nbytes=4)


def relay(call, own):
    return Relay(call, [4] * call.group.size)


def scatter(call, own):
    return SparseReduceScatter(call, own, [0, 2, 4])


def posts(group, made):
    """What a part posts when it is made, and once it is started."""
    rows = weft.Rows(torch.arange(4), torch.ones(4, 2), 8)
    request = Request.of(rows, "sum", "split", None)
    own, call = run.begun(group, request, "parts")
    posted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call.group, "post", lambda *args: posted.append(args))
        part = made(call, own)
        before = len(posted)
        part.start()
    return before, len(posted)


@pytest.mark.parametrize("made", [lists, inflow, ring, relay, scatter])
def test_to_make_a_part_posts_nothing_and_to_start_it_does(made):
    for before, after in run_on_threads(2, posts, made):
        assert before == 0 < after
