"""Scripts of benchmarks/, as modules: what tests look at is what the script runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports one anew, as a plain module, the way the scripts import each other."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        for file in FOLDER.glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        return importlib.import_module(name)

    return load
