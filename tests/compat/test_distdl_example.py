"""The document's example, and a whole program of DistDL's kind, against one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft.compat.distdl import AllGather, MPIPartition, zero_volume_tensor
from weft.testing import run, spmd

EXAMPLE = """
P_x_base = P_world.create_partition_inclusive(np.arange(0, 12))
P_x = P_x_base.create_cartesian_topology_partition([2, 2, 3])

x_local_shape = np.array([3, 7, 4])

axes_all_gather = (2,)
layer = AllGather(P_x, axes_all_gather)

x = zero_volume_tensor()
if P_x.active:
    x = torch.rand(*x_local_shape)

y = layer(x)
"""


def test_the_example_of_the_document():
    def program(group):
        space = {
            "np": np,
            "torch": torch,
            "AllGather": AllGather,
            "zero_volume_tensor": zero_volume_tensor,
            "P_world": MPIPartition(),
        }
        exec(EXAMPLE, space)
        return space["x"], space["y"]

    found = run(13, program)
    for rank, (x, y) in enumerate(found):
        if rank == 12:
            assert y.shape == (0,) and y is not x
            continue
        assert list(y.shape) == [3, 7, 12]
        first = rank - rank % 3
        torch.testing.assert_close(y, torch.cat([found[r][0] for r in range(first, first + 3)], 2))


def _script():
    path = Path(__file__).with_name("distdl_script.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()  # here: ranks that are threads would load it at the same time


@spmd(5)
def test_a_program_gives_what_one_process_gives(group):
    loss, index, found = script.main()
    expected, grads = script.sequential()
    if group.rank == 0:
        assert loss == pytest.approx(expected)
        torch.testing.assert_close(found["weight"], grads["conv"])
        torch.testing.assert_close(found["images"], grads["images"])
    if group.rank == 4:
        assert index is None and loss == 0
        return
    shape = grads["linear"].shape
    part = weft.Partition([2, 2]).box(shape).slices
    torch.testing.assert_close(found["linear.weight"], grads["linear"][part])
    assert ("linear.bias" in found) == (index[1] == 0)
    if index[1] == 0:
        torch.testing.assert_close(found["linear.bias"], grads["bias"][part[0]])
