"""The kernels that serve an accelerator: the host waits in none of them.

Tensors of the `meta` device have no numbers. So what runs on them reads none, and makes no result
whose size depends on them: torch raises there. `Copies` raises for what else makes a host wait.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from weft import kernels
from weft.kernels.ops import DTYPES, OPS, Op

FIRST = Op("callable first", lambda left, right: left.clone(), builtin=False)
CASES = [(d, op) for d in DTYPES for op in (*OPS.values(), FIRST) if op.refuses(d) is None]
# each dtype once, and each op in a dtype of each kind
EACH_ONCE = [(d, op) for d, op in CASES if op.name == "sum" or d in (torch.int32, torch.bfloat16)]


class Copies(TorchFunctionMode):
    """Fails where numbers would be copied from the host's memory, or a mask be counted to write."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("tensor", "as_tensor", "from_numpy")
        assert all(each.is_meta for each in args if isinstance(each, torch.Tensor)), name
        if name == "__setitem__":
            assert isinstance(args[2], torch.Tensor)
            assert getattr(args[1], "dtype", None) is not torch.bool
        return func(*args, **kwargs or {})


def empty(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("dtype", "op"), EACH_ONCE)
def test_values_take_no_wait(dtype, op):
    values = empty(20, 4, dtype=dtype)
    found = kernels.Distinct(empty(8), empty(20), empty(9), 5)
    with Copies():
        for distinct in (found, found._replace(order=None), found._replace(order=None, most=1)):
            assert kernels.reduce(values, distinct, op).shape == (8, 4)
        unique = kernels.Distinct(empty(20), empty(20), None, 1)
        assert kernels.reduce(values, unique, op).shape == (20, 4)
        out = empty(8, 4, dtype=op.accumulator(dtype))
        kernels.finish(out, out.to(dtype), 3 if op.mean else 1)
