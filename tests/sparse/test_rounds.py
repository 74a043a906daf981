"""Index lists in rounds, as tensors of a device travel: what a rank says wrong of them is named."""

from __future__ import annotations

import struct

import pytest
import torch

import weft
from weft.group.group import Group
from weft.testing import run


def spoilt(group):
    """The error of a sum to which rank 1 sends something else than it should."""
    rows = weft.Rows(torch.arange(5000) * 3, torch.ones(5000, 2), 15_000)
    with pytest.raises(weft.WireError) as caught:
        weft.sparse_all_reduce(rows, algorithm="gather")
        weft.barrier()  # on a device the host may look only later
    return str(caught.value)


@pytest.mark.parametrize("length", [1 << 60, -5])
def test_who_says_impossible_lengths_is_named(length, monkeypatch):
    exchange = Group.all_gather_bytes

    def exchanged(group, message, decode, what="a message"):
        if what == "lengths of lists" and group.session.rank == 1:
            message = struct.pack("<q", length) + message[8:]
        return exchange(group, message, decode, what)

    monkeypatch.setattr(Group, "all_gather_bytes", exchanged)
    for text in run(3, spoilt, on="device"):
        assert "rank 1 sent lengths of lists" in text
