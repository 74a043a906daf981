"""Who may call torch.distributed, that files import in no circle, that no constructor communicates,
and that tests of wires and groups reach nothing of weft's by an underscore.

The types of torch.distributed may be named anywhere, its functions called only by few. The order of
weft's own layers is import-linter's business (`make layers`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import graphlib
import importlib.util
import textwrap
from pathlib import Path

import pytest

import weft


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


SOURCE = Path(weft.__file__).parent
# cli/ and testing/: peers, and launching; nn/dtensor: a DTensor is made of its placements;
# sharded/checkpoints: states of a model and its optimizers are read, and nothing is sent
CALLERS = (
    "rendezvous/",
    "wire/",
    "failure/",
    "group/",
    "verbs/",
    "backend/",
    "bootstrap/",
    "nn/dtensor.py",
    "nn/mesh.py",
    "nn/sharded/checkpoints.py",
    "base/_torch.py",
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
        for line, name in calls(tree_of(path))
    ]
    assert found == []


def test_who_has_tensors_moved_does_not_ask_devices():
    """Verbs carry what is on one, and `base.devices` knows streams."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for room in ("comm", "group", "nn", "schedules", "sparse")
        for path in sorted((SOURCE / room).rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("torch.cuda", "torch.accelerator", "torch.Stream")
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
        for node in ast.walk(tree_of(path)):
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


def all_of_weft():
    """What each file in a room of weft imports of others: the face hands names on, and the file of
    the version imports nothing."""
    graph = imports_among(files_of(SOURCE, "."), SOURCE)
    on_top = {"weft", "weft.__main__", "weft.version"}
    return {module: graph[module] - on_top for module in graph.keys() - on_top}


def test_files_import_in_no_circle():
    graph = all_of_weft()
    assert "weft.group.worker" in graph["weft.group.session"]
    assert circle_in(graph) == []


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


# making an object is free

SENDS = (
    "begin",
    "call",
    "confess",
    "exchange",
    "opened",
    "post",
    "start",
    "submit",
    "wait",
)
ROOMS = ("call", "comm", "ddp", "failure", "group", "nn", "schedules", "sparse")


def sent_by_constructors(tree):
    """What constructors call that sends to other ranks, or waits for them."""
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for function in made.body:
            if getattr(function, "name", "") in ("__init__", "__post_init__"):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        name = ast.unparse(node.func)
                        if name.rpartition(".")[2] in SENDS:
                            yield f"{made.name} calls {name}"


def test_no_constructor_communicates():
    found = [
        f"{path.relative_to(SOURCE)}: {what}"
        for path in files_of(SOURCE, *ROOMS)
        for what in sent_by_constructors(tree_of(path))
    ]
    assert found == []
    house = "class A:\n    def __init__(self):\n        self.group.post()"
    assert [*sent_by_constructors(ast.parse(house))] == ["A calls self.group.post"]


# tests reach what users and other rooms reach

TESTS = Path(__file__).parent
OF_PUBLIC_NAMES = ("wire", "group", "bootstrap", "backend", "failure", "rendezvous")
BY_NAME = {"setattr", "delattr", "getattr", "hasattr"}  # also monkeypatch's
ALLOWED = {
    "_torch": "weft's file of what torch hides; the names in it are plain",
    "_version": "torch's: no public name says how often a tensor was written to",
    "_DistTestBase": "torch's: its own tests of a backend, which are run",
}


def is_hidden(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_call_by_name(node):
    if not isinstance(node, ast.Call) or not node.args:
        return False
    return ast.unparse(node.func).split(".")[-1] in BY_NAME


def programs_in(tree):
    """The programs that a file has as texts, such as those that it runs in other processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            with contextlib.suppress(SyntaxError):  # it is no program
                yield node.lineno, ast.parse(textwrap.dedent(node.value))


def foreign_names(tree):
    """The names under which a file imports what is not weft's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                if module.split(".")[0] != "weft":
                    names.add((alias.asname or alias.name).split(".")[0])
    return names


def own_names(tree):
    """The attributes that the classes of a file set or define."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def names_reached(node, own, foreign):
    """The names by which a node reaches what is neither the file's own nor foreign to weft."""
    if isinstance(node, ast.Attribute):
        if not is_hidden(node.attr):  # as most are not: to write each out takes long
            return []
        receiver = ast.unparse(node.value)
        is_own = receiver == "self" and node.attr in own
        return [] if is_own or receiver.split(".")[0] in foreign else [node.attr]
    if isinstance(node, ast.Import):
        modules = [alias.name.split(".") for alias in node.names]
        return [part for parts in modules if parts[0] == "weft" for part in parts]
    if isinstance(node, ast.ImportFrom):
        parts = (node.module or "").split(".")
        return [*parts, *(alias.name for alias in node.names)] if parts[0] == "weft" else []
    if is_call_by_name(node) and ast.unparse(node.args[0]).split(".")[0] not in foreign:
        inner = [each for arg in node.args[:2] for each in ast.walk(arg)]
        texts = [each.value for each in inner if isinstance(each, ast.Constant)]
        return [part for text in texts if isinstance(text, str) for part in text.split(".")]
    return []


def hidden_uses(tree):
    """The names with an underscore by which a file reaches what is weft's, with the line."""
    own = own_names(tree)
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        for name in names_reached(node, own, foreign):
            if is_hidden(name):
                yield node.lineno, name
    for line, program in programs_in(tree):
        for within, name in hidden_uses(program):
            yield line + within - 1, name


def test_tests_reach_nothing_of_wefts_by_an_underscore():
    found = [
        (f"{path.relative_to(TESTS)}:{line}", name)
        for room in OF_PUBLIC_NAMES
        for path in sorted((TESTS / room).rglob("*.py"))
        for line, name in hidden_uses(tree_of(path))
    ]
    assert [use for use in found if use[1] not in ALLOWED] == []
    assert ALLOWED.keys() == {name for _, name in found}, "what nobody uses is to go"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from weft.wire.tcp import _wire", "_wire"),
        ("from weft.base._torch import keep", "_torch"),
        ("wire._turn.acquire()", "_turn"),
        ("class Both(Wire):\n    def close(self):\n        self._inside.close()", "_inside"),
        ("wires[0].session._worker = None", "_worker"),
        ("monkeypatch.setattr(control, '_PATIENCE', 0.1)", "_PATIENCE"),
        ("monkeypatch.setattr('weft.base.memory._shelf', None)", "_shelf"),
        ("PROGRAM = '\\n    import weft\\n    weft.group()._wires'", "_wires"),
    ],
)
def test_a_name_with_an_underscore_is_seen(source, name):
    assert [use for _, use in hidden_uses(ast.parse(source))] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "from torch.cuda._sanitizer import EventHandler",
        "class Mine:\n    def __init__(self):\n        self._sock = 1\n        self._sock += 1",
        "for _ in range(3): made.__wrapped__",
    ],
)
def test_what_is_ones_own_or_another_librarys_is_passed_over(source):
    assert list(hidden_uses(ast.parse(source))) == []
