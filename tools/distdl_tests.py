"""DistDL's own tests over weft.compat.distdl: a plugin of pytest, which runs nothing of its own.

    git clone https://github.com/microsoft/distdl && cd distdl/tests
    pip install einops
    # pytest 9 refuses marks on fixtures, NumPy 2.4 an array of a tensor as an element
    sed -i '/^@pytest.mark.mpi$/d' conftest.py
    sed -i -E 's/np.array\\(\\[(torch.sum\\(.*\\))\\]\\)/float(\\1)/' adjoint_test.py

    export PYTHONPATH=/path/to/weft/tools:. DISTDL=../src
    tests="-c /dev/null --rootdir . -p distdl_tests primitives utilities layers"
    mpirun -n 18 python -m pytest $tests
    RANKS=18 python -m pytest $tests

`distdl` and its modules are those of weft.compat.distdl. The layers with weights, which weft does
not have, are loaded from DistDL's source. In the last line ranks are threads of one process, and
MPI is weft's: it needs neither mpirun nor mpi4py, and takes two minutes.

docs/coming-from-distdl.md says which cases fail, and why.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import weft.compat.distdl
from weft.testing import run

RANKS = int(os.environ.get("RANKS", "0"))
SOURCE = Path(os.environ["DISTDL"])
NOT_HERE = {"interpolate", "upsampling"}  # they need a C++ extension of DistDL's

torch.set_num_threads(1)


class Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `distdl` and its modules: those of weft, else DistDL's own source of a layer."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "distdl" and not name.startswith("distdl."):
            return None
        if importlib.util.find_spec(f"weft.compat.{name}") is not None:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return importlib.util.spec_from_file_location(name, SOURCE / f"{name.replace('.', '/')}.py")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(f"weft.compat.{spec.name}")

    def exec_module(self, module: ModuleType) -> None:
        """Weft's module is complete."""


def layer(name: str) -> Any:
    """What DistDL's package `nn` has and weft's has not: a module, or a layer from one of them."""
    own = {file.stem for file in (SOURCE / "distdl/nn").glob("*.py")} - NOT_HERE - {"__init__"}
    if name in own:
        return importlib.import_module(f"distdl.nn.{name}")
    for each in sorted(own):
        module = importlib.import_module(f"distdl.nn.{each}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"DistDL has no layer {name}")


sys.meta_path.insert(0, Names())
weft.compat.distdl.nn.__getattr__ = layer  # type: ignore[attr-defined]  # a module may have one
if RANKS:
    sys.modules["mpi4py"] = ModuleType("mpi4py")
    sys.modules["mpi4py"].MPI = weft.compat.distdl.MPI  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test on all threads, each with fixtures of its own."""
    if not RANKS:
        return None
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    names = inspect.signature(pyfuncitem.obj).parameters

    def program(group: weft.Group) -> None:
        given = {name: parameters.get(name) for name in names}
        if "comm_split_fixture" in given:
            active = group.rank < parameters["comm_split_fixture"]
            comm = weft.compat.distdl.MPI.COMM_WORLD.Split(int(not active))
            given["comm_split_fixture"] = (comm, active)
        pyfuncitem.obj(**given)

    run(RANKS, program, timeout=30.0)
    return True
