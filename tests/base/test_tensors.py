"""What is asked of tensors before they are read or written."""

from __future__ import annotations

import itertools

import torch

from weft.base.tensors import shares_elements


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
            assert shares_elements(tensor) == (len({*places}) < len(places)), (shape, steps)
