"""What is kept of layers, plans foremost, is integers: a group goes when its group does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import weft
from weft import Partition, WeftError
from weft.nn.compiled import number, spec_of
from weft.testing import run, spmd


def every_kind_of_plan(group):
    """Call layers in a group of the caller's, and leave nothing behind but a weak reference."""
    partition = Partition(2, group=group)
    x = torch.ones(2, requires_grad=True)
    weft.nn.AllGather(partition, 0)(x).sum().backward()
    weft.nn.SumReduce(partition, 0)(x).sum().backward()
    weft.nn.Repartition(partition, partition.reshape(1))(x)
    number(weft.nn.AllGather(partition, 0, shape=(4,)).spec)
    return weakref.ref(group)


def test_what_is_kept_of_layers_keeps_no_wire():
    groups = run(2, every_kind_of_plan)
    gc.collect()
    assert [group() for group in groups] == [None, None]


@spmd(1, on=("threads",))
def test_compiled_code_finds_a_spec_whose_layer_is_gone(group):
    key = number(weft.nn.AllGather(Partition(1, group=group), 0).spec)
    gc.collect()
    assert spec_of(key).partitions[0].group is group
    layer = weft.nn.AllGather(Partition(1), 0)
    assert spec_of(number(layer.spec)) is layer.spec
    gone = run(1, lambda group: number(weft.nn.AllGather(Partition(1, group=group), 0).spec))
    gc.collect()
    with pytest.raises(WeftError, match="AllGather in a group that is gone"):
        spec_of(gone[0])
