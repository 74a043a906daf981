"""Without rich and matplotlib, the extra `demo`: all serves but the demo, which says so."""

import pkgutil

import pytest

import weft
from weft.cli.demo.command import EXTRA

# In a process that has imported the library already, and nothing of the command line. None where a
# module would be: there is no such one.
WITHOUT = f"""
import sys
assert not {{*{EXTRA}}} & {{*sys.modules}}
sys.modules.update(dict.fromkeys({EXTRA}))
"""

ONLY_THE_DEMO = ("weft.cli.demo.live", "weft.cli.demo.report")


def test_every_module_of_the_library_is_imported_and_a_call_works(programs):
    found = [each.name for each in pkgutil.walk_packages(weft.__path__, "weft.")]
    others = [name for name in found if name not in (*ONLY_THE_DEMO, "weft.__main__")]
    assert {*ONLY_THE_DEMO} < {*found}
    program = f"""
import importlib, torch, weft
for name in {others}:
    importlib.import_module(name)
with weft.init():
    print(weft.sparse_all_reduce((torch.tensor([2, 1]), torch.ones(2)))[0].tolist())
"""
    done = programs(WITHOUT + program)
    assert done.communicate() == ("[1, 2]\n", "") and done.returncode == 0


@pytest.mark.parametrize(
    "start",
    ["import weft.cli; weft.cli.main()", "import runpy; runpy.run_module('weft')"],
    ids=["script", "python -m weft"],
)
def test_the_demo_says_in_a_sentence_what_to_install_and_the_doctor_runs(start, programs, tmp_path):
    done = programs(WITHOUT + start, "demo", "--out", str(tmp_path / "out"))
    words = "weft demo: it needs rich and matplotlib: pip install 'weft-collectives[demo]'\n"
    assert done.communicate() == ("", words)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    done = programs(WITHOUT + start, "doctor")
    out, err = done.communicate()
    assert (done.returncode, err) == (0, "")
    assert "note  no rich, for weft demo: pip install 'weft-collectives[demo]'" in out
