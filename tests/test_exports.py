"""What a person finds in `weft` is what `weft.__all__` names, in order, with a docstring."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import weft
from weft.base.pace import patient


def test_exported_names():
    found = {name for name, thing in vars(weft).items() if not isinstance(thing, ModuleType)}
    things = {name: getattr(weft, name) for name in weft.__all__}
    assert {name for name in found if not name.startswith("_")} <= set(things)
    assert list(things) == sorted(weft.__all__)
    assert all(thing.__doc__ for thing in things.values())


def test_importing_weft_loads_little_of_it_before_it_is_used_and_starts_nothing():
    """By the names of modules, beside those that torch loads itself; `_torch` acts in forks.

    A room is found without an import of its own: each in a fork, where no other has imported it.
    """
    program = (
        "import os\n"
        "def held():\n"
        "    fds = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "           if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "    return len(os.listdir('/proc/self/task')), sorted(fds)\n"
        "import torch, torch.distributed, sys\n"
        "had = {*sys.modules}; before = held(); import weft\n"
        "assert held() == before, (before, held())\n"
        "print(*sorted({*sys.modules} - had), flush=True)\n"
        "for name in ('testing', 'nn'):\n"
        "    if os.fork() == 0:\n"
        "        print(getattr(weft, name).__name__, name in dir(weft), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "before = held()  # a fork ends threads of OpenBLAS\n"
        "weft.all_reduce, weft.init, weft.explain\n"
        "heavy = {'matplotlib', 'numba', 'sympy', 'torch._dynamo', 'weft.nn'}\n"
        "print(*sorted(heavy & {*sys.modules} - had))\n"
        "import weft.ddp, weft.bootstrap.init, weft.bootstrap.local, weft.kernels.jit\n"
        "assert held() == before, (before, held())\n"
        "assert not {'numba', 'llvmlite.binding'} & {*sys.modules}\n"
    )
    line = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patient(150.0))
    assert (done.returncode, done.stderr) == (0, "")
    rooms = ["weft.testing True", "weft.nn True"]
    loaded = "weft weft.backend weft.base weft.base._torch weft.version"
    assert done.stdout.splitlines() == [loaded, *rooms, ""]


def test_only_what_is_compiled_loads_the_compiler(programs):
    program = (
        "import sys, torch, weft, weft.nn, weft.compat.distdl.nn\n"
        "with weft.init():\n"
        "    weft.nn.AllSumReduce(weft.Partition(1), 0)(torch.ones(2)).sum()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert programs(program).communicate() == ("False\n", "")


def test_a_name_that_there_is_not_is_an_error():
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'all_gather'"):
        weft.all_gather  # noqa: B018


PUBLIC = (
    "weft",
    "weft.nn",
    "weft.ddp",
    "weft.testing",
    "weft.sparse",
    "weft.trainers",
    "weft.compat.oneccl",
    "weft.compat.distdl",
    "weft.compat.distdl.nn",
    "weft.compat.sar",
)


def test_public_names_stay():
    """A name that is added is added to the list, too; one that goes is named in the changelog."""
    listed = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()
    assert sorted(public_names()) == listed


def public_names():
    for room in PUBLIC:
        module = importlib.import_module(room)
        own = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and not isinstance(thing, ModuleType)
        ]
        for name in getattr(module, "__all__", own):
            assert hasattr(module, name)
            yield f"{room}.{name}"
