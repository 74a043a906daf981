"""What is asked of tensors before they are read or written."""

from __future__ import annotations

import itertools

import pytest
import torch

from weft.base.tensors import overlapping, shares_elements


def test_elements_share_memory_where_two_places_are_one():
    memory = torch.empty(100)
    shapes = [(), (0,), (1, 3), (2, 3), (3, 2), (0, 4), (2, 1, 3), (2, 3, 2)]
    for shape in shapes:
        for steps in itertools.product(range(6), repeat=len(shape)):
            tensor = memory.as_strided(shape, steps)
            places = [
                sum(map(int.__mul__, place, steps))
                for place in itertools.product(*map(range, shape))
            ]
            if len({*places}) < len(places):
                assert shares_elements(tensor), (shape, steps)


def test_tensors_overlap_from_their_first_byte_to_their_last():
    memory = torch.empty(100)
    for first, second, overlap in (
        (memory[:4], memory[4:], False),
        (memory[:4], memory[3:], True),
        (memory[0:7:2], memory[7:], False),  # up to the last element, and no further
        (memory[0:7:2], memory[6:], True),
        (memory[0:7:2], memory[1:8:2], True),  # one within the other
        (memory[4:4], memory, False),
    ):
        assert overlapping(first, second) == overlap
        assert overlapping(second, first) == overlap


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole.transpose(0, 2),
        lambda whole: whole[:, 1:, ::2],
        lambda whole: whole[:, :1].permute(3, 2, 1, 0),
        lambda whole: whole.diagonal(),
        lambda whole: whole[:, :, :0].transpose(0, 1),
        lambda whole: whole.to(memory_format=torch.channels_last),
    ],
)
def test_views_of_a_part_share_no_memory(view):
    assert not shares_elements(view(torch.ones(2, 3, 4, 5)))
