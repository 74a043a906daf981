"""Without typer and rich, the extra `cli`: the library serves, and the command says so."""

import pkgutil

import pytest

import weft

# In a process that has imported the library already, and nothing of the command line. None where a
# module would be: there is no such one.
WITHOUT = """
import sys
assert not {{'typer', 'rich', 'weft.cli'}} & {{*sys.modules}}
sys.modules.update(dict.fromkeys({missing}))
"""


def needs_the_extra(module: str) -> bool:
    """Whether a module is the command line's own; its text and training serve the examples, too."""
    if module in ("weft.cli", "weft.cli.demo", "weft.cli.demo.text", "weft.cli.demo.train"):
        return False
    return module == "weft.__main__" or module.startswith("weft.cli.")


def test_every_module_of_the_library_is_imported_and_a_call_works(programs):
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
    done = programs(WITHOUT.format(missing=("typer", "rich")) + program)
    assert done.communicate() == ("[1, 2]\n", "") and done.returncode == 0


@pytest.mark.parametrize("missing", [("typer", "rich"), ("typer",), ("rich",)])
@pytest.mark.parametrize(
    "start",
    ["import weft.cli; weft.cli.main()", "import runpy; runpy.run_module('weft')"],
    ids=["script", "python -m weft"],
)
def test_the_command_says_in_a_sentence_what_to_install(missing, start, programs):
    done = programs(WITHOUT.format(missing=missing) + start, "doctor")
    words = f"weft: the command line needs {missing[0]}: pip install typer rich\n"
    assert done.communicate() == ("", words)
    assert done.returncode == 1


def test_another_module_that_is_missing_is_an_error_as_everywhere(programs):
    done = programs(WITHOUT.format(missing=("psutil",)) + "import weft.cli; weft.cli.main()")
    _, err = done.communicate()
    assert done.returncode == 1
    assert "ModuleNotFoundError" in err and "pip install" not in err
