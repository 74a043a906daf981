"""What weft.trainers says of frameworks that are not there, too old, or something else."""

from __future__ import annotations

import importlib.metadata
import types

import accelerate
import pytest

import weft
from weft.trainers import frameworks


def test_no_framework_is_imported_before_it_is_asked_for(programs):
    program = (
        "import sys, torch, weft; weft.trainers.huggingface\n"
        "print(*sorted({'accelerate', 'lightning', 'transformers'} & {*sys.modules}))"
    )
    assert programs(program).communicate() == ("\n", "")


def test_a_framework_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(frameworks.OLDEST, "no-such", "1.0")
    with pytest.raises(weft.WeftError, match="no-such is not installed here: pip install no-such"):
        frameworks.import_framework("no_such.strategies", "no-such")


def test_what_a_framework_itself_lacks_is_not_hidden(monkeypatch):
    def lacks(name):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(frameworks.importlib, "import_module", lacks)
    with pytest.raises(ModuleNotFoundError, match="other"):
        frameworks.import_framework("lightning.pytorch", "lightning")


@pytest.mark.parametrize("version", ["1.0.9", "0.34", "1.0rc1"])
def test_one_that_is_too_old_is_named(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    text = rf"accelerate {version} is too old .*: pip install 'accelerate>=1\.1'"
    with pytest.raises(weft.WeftError, match=text):
        weft.trainers.accelerate(accelerate.Accelerator(cpu=True))


@pytest.mark.parametrize("version", ["1.1.0", "2.0.dev1", "1.15"])
def test_newer_ones_serve(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    frameworks.check_version("accelerate")


def test_what_is_no_such_thing_is_told():
    with pytest.raises(weft.WeftError, match=r"this is a str: pass an accelerate\.Accelerator"):
        weft.trainers.accelerate("abc")
    with pytest.raises(weft.WeftError, match=r"this is a int: pass an transformers\.Trainer"):
        weft.trainers.huggingface(3)
    with pytest.raises(AttributeError, match=r"'weft\.trainers' has no attribute 'fabric'"):
        weft.trainers.fabric  # noqa: B018


def test_what_is_not_under_distributed_data_parallel_is_refused(monkeypatch):
    made = accelerate.Accelerator(cpu=True)
    kind = types.SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP)
    monkeypatch.setattr(type(made), "distributed_type", kind.distributed_type)
    with pytest.raises(weft.WeftError, match=r"trains under FSDP: .* is for models in Distributed"):
        weft.trainers.accelerate(made)
