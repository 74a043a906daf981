"""Without typer and rich, the extra `cli`: the library serves, and the command says so."""

import pkgutil
import subprocess
import sys

import pytest

import weft

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing}))\n"  # None there: no such module


def python(missing: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in which these packages cannot be imported."""
    line = [sys.executable, "-c", WITHOUT.format(missing=missing) + program]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def needs_the_extra(module: str) -> bool:
    """Whether a module is the command line's own; its text and training serve the examples, too."""
    if module in ("weft.cli", "weft.cli.demo", "weft.cli.demo.text", "weft.cli.demo.train"):
        return False
    return module == "weft.__main__" or module.startswith("weft.cli.")


def test_every_module_of_the_library_is_imported_and_a_call_works():
    found = [each.name for each in pkgutil.walk_packages(weft.__path__, "weft.")]
    library = [name for name in found if not needs_the_extra(name)]
    assert "weft.cli.demo.train" in library and "weft.comm.gradients" in library
    program = f"""
import importlib, torch, weft
for name in {library}:
    importlib.import_module(name)
with weft.init():
    print(weft.sparse_all_reduce((torch.tensor([2, 1]), torch.ones(2)))[0].tolist())
"""
    done = python(("typer", "rich"), program)
    assert (done.returncode, done.stdout) == (0, "[1, 2]\n"), done.stderr


@pytest.mark.parametrize("missing", [("typer", "rich"), ("typer",), ("rich",)])
@pytest.mark.parametrize(
    "start",
    ["import weft.cli; weft.cli.main()", "import runpy; runpy.run_module('weft')"],
    ids=["script", "python -m weft"],
)
def test_the_command_says_in_a_sentence_what_to_install(missing, start, programs):
    """In a process that has imported the library already, and nothing of the command line."""
    program = (
        "import sys; assert not {'typer', 'rich', 'weft.cli'} & {*sys.modules}\n"
        + WITHOUT.format(missing=missing)
        + start
    )
    done = programs(program, "doctor")
    words = f"weft: the command line needs {missing[0]}: pip install typer rich\n"
    assert done.communicate() == ("", words)
    assert done.returncode == 1


def test_another_module_that_is_missing_is_an_error_as_everywhere():
    done = python(("psutil",), "import weft.cli; weft.cli.main()")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "pip install" not in done.stderr
