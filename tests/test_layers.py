"""Who may call torch.distributed, and that files of `wire/` and `group/` import in no circle.

The types of torch.distributed may be named anywhere, its functions called only by few. The order of
weft's own layers is import-linter's business (`make layers`). It passes over imports for types, so
for those two rooms these are walked here, too.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import tomllib
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).resolve().parent.parent
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


def layers():
    """The layers of the house, as import-linter has them, the highest first; each is packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each["type"] == "layers"]
    return [layer.split(" | ") for layer in contract["layers"]]


def arrows_upward(graph, layers):
    """Imports of what does not lie in a lower layer, nor in the same package."""
    depths = {package: depth for depth, layer in enumerate(layers) for package in layer}

    def package_of(module):
        return ".".join(module.split(".")[:2])

    found = []
    for module, imported in graph.items():
        own = package_of(module)
        for other in map(package_of, imported):
            # what is in no layer is the face of the house, above all of them
            if other != own and depths.get(other, -1) <= depths[own]:
                found.append(f"{module} imports {other}")
    return found


def test_files_of_wires_and_groups_import_from_below_alone():
    """For types, too, and late."""
    graph = imports_among(sorted(SOURCE.rglob("*.py")), SOURCE)
    rooms = {
        module: imported
        for module, imported in graph.items()
        if module.startswith(("weft.wire", "weft.group"))
    }
    assert "weft._torch" in rooms["weft.group.route"]
    assert arrows_upward(rooms, layers()) == []


LINES = [
    "from .one import a",
    "from . import one",
    "import house.one",
    "if TYPE_CHECKING:\n    from .one import A",
    "def late():\n    from house import one",
]


@pytest.fixture
def house(tmp_path):
    """Makes a house of two files, of which the first imports from the second."""

    def make(line):
        source = tmp_path / "house"
        source.mkdir()
        (source / "__init__.py").write_text("from .two import b")
        (source / "one.py").write_text("from .two import b")
        (source / "two.py").write_text(line)
        return imports_among(sorted(source.rglob("*.py")), source)

    return make


@pytest.mark.parametrize("line", LINES)
def test_a_circle_is_seen(house, line):
    assert set(circle_in(house(line))) == {"house.one", "house.two"}


@pytest.mark.parametrize("line", [*LINES, "import house"])
def test_an_arrow_upward_is_seen(house, line):
    graph = house(line)
    del graph["house"]  # the face imports from everywhere
    upward = "house" if line == "import house" else "house.one"
    assert arrows_upward(graph, [["house.one"], ["house.two"]]) == [f"house.two imports {upward}"]
