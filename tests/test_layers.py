"""Who may call torch.distributed: its types may be named anywhere, its functions only by few.

The order of weft's own layers is import-linter's business (`make layers`).
"""

from __future__ import annotations

import ast
from pathlib import Path

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
