"""What weft.trainers says of frameworks that are not there, or of something else."""

from __future__ import annotations

import importlib
import types

import accelerate
import pytest

import weft
from weft.trainers.strategy import strategy_class


def test_no_framework_is_imported_before_it_is_asked_for(programs):
    program = (
        "import sys, torch, weft; weft.trainers.huggingface\n"
        "print(*sorted({'accelerate', 'lightning', 'transformers'} & {*sys.modules}))"
    )
    assert programs(program).communicate() == ("\n", "")


@pytest.mark.parametrize(
    ("lacks", "raises", "said"),
    [
        ("lightning.pytorch", weft.WeftError, "lightning is not installed here: pip install"),
        ("other", ModuleNotFoundError, "No module named 'other'"),  # which Lightning itself needs
    ],
)
def test_a_framework_that_is_not_installed_is_named(monkeypatch, lacks, raises, said):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {lacks!r}", name=lacks)

    monkeypatch.setattr(importlib, "import_module", fail)
    strategy_class.cache_clear()
    with pytest.raises(raises, match=said):
        weft.trainers.lightning()


def test_what_is_no_such_thing_is_told():
    with pytest.raises(weft.WeftError, match=r"this is a str: pass a accelerate\.Accelerator"):
        weft.trainers.accelerate("abc")
    with pytest.raises(weft.WeftError, match=r"this is a int: pass a transformers\.Trainer"):
        weft.trainers.huggingface(3)
    with pytest.raises(AttributeError, match=r"'weft\.trainers' has no attribute 'fabric'"):
        weft.trainers.fabric  # noqa: B018


def test_what_is_not_under_distributed_data_parallel_is_refused(monkeypatch):
    made = accelerate.Accelerator(cpu=True)
    kind = types.SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP)
    monkeypatch.setattr(type(made), "distributed_type", kind.distributed_type)
    with pytest.raises(weft.WeftError, match=r"trains under FSDP: .* is for models in Distributed"):
        weft.trainers.accelerate(made)
