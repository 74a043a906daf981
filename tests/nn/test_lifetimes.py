"""What is kept of layers, plans foremost, is integers: a group goes when its group does."""

from __future__ import annotations

import gc
import weakref

import torch

import weft
from weft import Partition
from weft.testing import run


def every_kind_of_plan(group):
    """Call layers in a group of the caller's, and leave nothing behind but a weak reference."""
    partition = Partition(2, group=group)
    x = torch.ones(2, requires_grad=True)
    weft.nn.AllGather(partition, 0)(x).sum().backward()
    weft.nn.SumReduce(partition, 0)(x).sum().backward()
    weft.nn.Repartition(partition, partition.reshape(1))(x)
    return weakref.ref(group)


def test_what_is_kept_of_layers_keeps_no_wire():
    groups = run(2, every_kind_of_plan)
    gc.collect()
    assert [group() for group in groups] == [None, None]
