"""Who may call torch.distributed, and that files of `wire/` and `group/` import in no circle.

The types of torch.distributed may be named anywhere, its functions called only by few. The order of
weft's own layers is import-linter's business (`make layers`); it passes over imports for types.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
# cli/ and testing/: peers, and launching; nn/dtensor: a DTensor is made of its placements;
# sharded/checkpoints: states of a model and its optimizers are read, and nothing is sent
CALLERS = (
    "wire/",
    "group/",
    "backend/",
    "bootstrap/",
    "nn/dtensor.py",
    "nn/mesh.py",
    "sharded/checkpoints.py",
    "_torch.py",
)


def calls(tree):
    """Names under which torch.distributed's functions are called in a file, with the line."""
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or a.name for a in node.names if a.name == "torch.distributed"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            aliases |= {a.asname or a.name for a in node.names}
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if any(name == alias or name.startswith(f"{alias}.") for alias in aliases):
                yield node.lineno, name


def test_only_few_call_torch_distributed():
    found = [
        f"{path.relative_to(SOURCE)}:{line} calls {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith((*CALLERS, "cli/", "testing/"))
        for line, name in calls(ast.parse(path.read_text()))
    ]
    assert found == []


def test_the_search_finds_what_it_should():
    tree = ast.parse("import torch.distributed as dist\ndist.ReduceOp.SUM\ndist.barrier()")
    assert list(calls(tree)) == [(3, "dist.barrier")]


def module_of(path, source):
    """The name of the module that a file of the package in this folder is."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_among(files, source):
    """For each of these files the others that it imports: at its top, late, or for types alone."""
    modules = {module_of(path, source): path for path in files}
    graph = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                name = "." * node.level + (node.module or "")
                origin = importlib.util.resolve_name(name, package)
                # of a package its file is imported only for names that are no modules in it
                for alias in node.names:
                    member = f"{origin}.{alias.name}"
                    imported.add(member if member in modules else origin)
        graph[module] = imported & modules.keys()
    return graph


def files_of(source, *rooms):
    return [path for room in rooms for path in sorted((source / room).rglob("*.py"))]


def circle_in(graph):
    """Modules that import each other in a circle; empty: there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_files_of_wires_and_groups_import_in_no_circle():
    graph = imports_among(files_of(SOURCE, "wire", "group"), SOURCE)
    assert "weft.wire.memory" in graph["weft.wire.factory"]
    assert "weft.wire.store" in graph["weft.group.control"]
    assert circle_in(graph) == []


@pytest.mark.parametrize(
    "line",
    [
        "from .one import a",
        "from . import one",
        "import house.one",
        "if TYPE_CHECKING:\n    from .one import A",
        "def late():\n    from house import one",
    ],
)
def test_a_circle_is_seen(tmp_path, line):
    source = tmp_path / "house"
    source.mkdir()
    (source / "__init__.py").write_text("from .two import b")
    (source / "one.py").write_text("from .two import b")
    (source / "two.py").write_text(line)
    graph = imports_among(sorted(source.rglob("*.py")), source)
    assert set(circle_in(graph)) == {"house.one", "house.two"}
