"""The host waits for a device in `read` alone: no other line takes numbers from a tensor there.

The sources say where tensors become numbers of the host, as far as one can see it without types.
`PLACES` lists these, each with the reason why the tensor is of the host, or who asked for the wait.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
ROOMS = ("call", "comm", "ddp", "nn", "schedules", "sparse", "verbs")

# methods of a tensor that wait for it
WAITING = {
    *("tolist", "item", "nonzero", "unique", "unique_consecutive", "cpu", "numpy"),
    *("masked_select", "new_tensor", "bincount", "equal"),
}
FUNCTIONS = {*WAITING, "tensor", "as_tensor", "argwhere"}  # of torch
NUMBERS = {"bool", "int", "float"}
FLAGS = {"any", "all", "isnan", "isfinite", "is_nonzero"}  # waits where they are a condition
# what makes a tensor of one number, which `int` would wait for
REDUCING = {*FLAGS, "amin", "amax", "argmin", "argmax", "sum", "prod", "count_nonzero", "cumsum"}

_CPU = "of the wire, which carries tensors of the CPU"
_BYTES = "of messages, which are of the CPU"
_NUMBERS = "of NumPy's, or numbers of Python"
PLACES = {
    "call/opening.py:Opening.mask": _BYTES,
    "call/opening.py:_heard_in_private": _BYTES,
    "comm/clip.py:clip_grad_norm_": "with error_if_nonfinite, as torch's own: the caller asked",
    "comm/named.py:_manifest_in": _BYTES,
    "ddp/largest.py:largest_entries": "where tensors are on the CPU; else `largest_by_sort`",
    "ddp/largest.py:_estimate": "for `largest_entries`",
    "ddp/sparsify.py:Picked.left": "asked on the CPU alone",
    "nn/broadcast.py": _NUMBERS,
    "nn/dtensor.py:_layout": "a mesh, which is of the CPU",
    "nn/dtensor.py:_cells": "a mesh, which is of the CPU",
    "nn/partition.py:Partition.from_mesh": "a mesh, which is of the CPU",
    "nn/partition.py:Partition.to_mesh": _NUMBERS,
    "nn/partition.py:Partition.keep": _NUMBERS,
    # whole files and folders
    "sparse/algorithms/": _CPU,
    "sparse/codec.py": _CPU,
    "sparse/header.py": _CPU,
    "sparse/owners.py": _CPU,
    "sparse/stream.py": _CPU,
    "sparse/request.py:Request.look": _CPU,
    "sparse/rows.py:Rows.from_coo": "asked on the CPU alone",
    "sparse/plain.py:_united": "asked on the CPU alone",
    "sparse/tables.py:requests_of": "asked on the CPU alone",
    "sparse/tables.py:reduced": _NUMBERS,
    "sparse/tables.py:_by_wire": _CPU,
    "sparse/tables.py:_agreed": _NUMBERS,
    "sparse/tables.py:_numbers_in": _NUMBERS,
    "verbs/group.py:read": "the one place",
}


def waits_in(source: str) -> dict[str, set[str]]:
    """For each function of a source what waits in it; "" is the module itself."""
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder.found


class Finder(ast.NodeVisitor):
    """Notes what waits, by the function that it is in."""

    def __init__(self):
        self.names = []
        self.found = {}

    def note(self, what):
        self.found.setdefault(".".join(self.names), set()).add(what)

    def visit_FunctionDef(self, node):
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node):
        function = node.func
        if isinstance(function, ast.Attribute):
            of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
            if of_torch and function.attr in ("tensor", "as_tensor"):
                devices = [each.value for each in node.keywords if each.arg == "device"]
                if any(not is_cpu(each) for each in devices):
                    self.note(f"torch.{function.attr}(device=)")
            elif function.attr in (FUNCTIONS if of_torch else WAITING):
                self.note(f"{function.attr}()")
        is_number = isinstance(function, ast.Name) and function.id in NUMBERS
        if is_number and any(map(is_reduced, node.args)):
            self.note(f"{function.id}()")
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if node.attr == "tolist" and isinstance(node.value, ast.Name) and node.value.id == "Tensor":
            self.note("tolist()")
        self.generic_visit(node)

    def visit_Subscript(self, node):
        if is_mask(node.slice):
            self.note("a mask")
        self.generic_visit(node)

    def condition(self, node):
        for each in parts_of(node):
            if is_call_of(each, FLAGS):
                self.note("a condition")

    def visit_If(self, node):
        self.condition(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_Assert = visit_If

    def visit_BoolOp(self, node):
        self.condition(node)
        self.generic_visit(node)


def parts_of(node):
    """What a condition consists of."""
    if isinstance(node, ast.BoolOp):
        return [part for each in node.values for part in parts_of(each)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return parts_of(node.operand)
    return [node]


def is_call_of(node, names):
    """Whether this is a call of such a method of something that is not a module."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    value = node.func.value
    is_of_module = isinstance(value, ast.Name) and value.id in ("math", "np", "inspect")
    return node.func.attr in names and not is_of_module


def is_reduced(node):
    """Whether this may be a tensor's one number: an element, or what a method made of all."""
    return is_call_of(node, REDUCING) or isinstance(node, ast.Subscript)


def is_mask(node):
    """Whether an index is made of a comparison."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return not (is_type(node.left) or is_type(node.right))
    return False


def is_type(node):
    """Whether this is a part of a union of types, as annotations have them."""
    named = isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
    is_none = isinstance(node, ast.Constant) and node.value is None
    return is_none or (named and ast.unparse(node).rpartition(".")[2][:1].isupper())


def is_cpu(node):
    return isinstance(node, ast.Constant) and node.value == "cpu"


def found_in(room):
    """What waits in a room, as "room/file.py:function"."""
    return {
        f"{path.relative_to(SOURCE)}:{name}": sorted(waits)
        for path in sorted((SOURCE / room).rglob("*.py"))
        for name, waits in waits_in(path.read_text()).items()
    }


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_waits_for_a_device_but_read(room):
    found = found_in(room)
    new = {place: waits for place, waits in found.items() if not any(map(place.startswith, PLACES))}
    assert not new, "use weft.verbs.group.read, or say in PLACES why this is of the host"
    listed = [place for place in PLACES if place.startswith(f"{room}/")]
    gone = [place for place in listed if not any(each.startswith(place) for each in found)]
    assert not gone, "these no longer wait: take them from PLACES"


@pytest.mark.parametrize(
    "line",
    [
        "x.tolist()",
        "x.sum().item()",
        "x.nonzero()",
        "torch.unique(x)",
        "x[x > 0]",
        "x[(x > 0) & y]",
        "x[~y]",
        "x.cpu()",
        "x.numpy()",
        "bool(x.any())",
        "int(x[0])",
        "float(x.sum())",
        "z = 1 if x.any() else 2",
        "z = y and x.all()",
        "x.new_tensor([1])",
        "torch.tensor([1], device=x.device)",
        "read = Tensor.tolist",
    ],
)
def test_what_waits_is_found(line):
    assert waits_in(f"def f(x, y):\n    {line}")


@pytest.mark.parametrize(
    "line",
    ["x[0]", "math.isnan(x)", "int(y)", "torch.tensor([1])", "any(x)", "c: list[T | None] = []"],
)
def test_what_does_not_is_not(line):
    assert not waits_in(f"def f(x, y):\n    {line}")
