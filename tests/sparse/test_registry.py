"""Algorithms that a program or an installed package registers."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch

import weft
from weft.sparse import ALGORITHMS, unregister
from weft.testing import processes, run

OFFER = """
import torch
import weft

@weft.algorithm()
def offered(rows, call):
    raise NotImplementedError
"""


def split(rows, call):
    """A function of this name that somebody else wrote."""
    raise NotImplementedError


def mine(rows, call):
    raise NotImplementedError


def test_a_name_that_is_taken_is_refused():
    before = ALGORITHMS["split"]
    known = "; there are doubling, gather, "
    with pytest.raises(
        weft.WeftError, match=rf"'split' is registered already, one of weft's own: .*{known}"
    ):
        weft.algorithm()(split)
    assert ALGORITHMS["split"] is before

    weft.algorithm()(mine)
    try:
        with pytest.raises(
            weft.WeftError, match=rf"registered already, that of {__name__}: .*{known}.* mine, "
        ):
            weft.algorithm()(mine)
    finally:
        unregister("mine")


@pytest.mark.parametrize("name", ["auto", "eager", "alone"])
def test_a_name_with_another_meaning_is_refused(name):
    def schedule(rows, call):
        raise NotImplementedError

    schedule.__name__ = name
    with pytest.raises(weft.WeftError, match=f"'{name}': that name has another meaning.*; there "):
        weft.algorithm(replace=True)(schedule)


def test_what_was_replaced_comes_back():
    own = ALGORITHMS["split"]
    rows = torch.arange(3), torch.ones(3)
    weft.algorithm(replace=True)(split)
    try:
        assert ALGORITHMS["split"].run is split
        with pytest.raises(NotImplementedError):
            run(2, lambda group: weft.sparse_all_reduce(rows, algorithm="split"))
    finally:
        unregister("split")
    assert ALGORITHMS["split"] is own
    indices, values = run(2, lambda group: weft.sparse_all_reduce(rows, algorithm="split"))[1]
    assert indices.tolist() == [0, 1, 2] and values.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("split", "one of weft's own, which stay; there are doubling, gather, "),
        ("magic", "is unknown: use auto or one of doubling, gather, "),
    ],
)
def test_what_cannot_be_removed(name, text):
    with pytest.raises(weft.WeftError, match=text):
        unregister(name)


def test_ranks_with_different_algorithms_raise_alike():
    wanted = (
        "the ranks differ in registered algorithms: rank 0 has weft's own, rank 1 has weft's own, "
        "mine (mine); pass the same on every rank"
    )
    for text, total in processes(2, register_on_one):
        assert text == wanted
        assert total == [2.0, 2.0]  # the next call works


def register_on_one():
    rows = torch.arange(2), torch.ones(2)
    with weft.init() as group:
        if group.rank == 1:
            weft.algorithm()(mine)
        with pytest.raises(weft.WeftError) as caught:
            weft.sparse_all_reduce(rows)
        if group.rank == 1:
            unregister("mine")
        return str(caught.value), weft.sparse_all_reduce(rows)[1].tolist()


@pytest.fixture
def installed(tmp_path):
    """`installed(name, source)` has a package beside weft that offers an algorithm `offered`."""

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = f"[weft.algorithms]\noffered = {name}:offered\n"
        (metadata / "entry_points.txt").write_text(points)
        return tmp_path

    return install


LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import logging, weft
logging.basicConfig(stream=sys.stderr, format="%(message)s")
from weft.sparse import ALGORITHMS
early = sys.argv[2] in sys.modules
said = ""
with weft.init() as group:
    import torch
    try:
        weft.sparse_all_reduce((torch.arange(2), torch.ones(2)), algorithm="offered")
    except weft.WeftError as error:
        said = str(error)
print(json.dumps([early, "offered" in ALGORITHMS, len(ALGORITHMS), said]))
"""


def answer(program):
    """What the program printed last."""
    out, error = program.communicate()
    assert program.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def test_an_installed_package_offers_an_algorithm(installed, programs):
    program = programs(LOOK, str(installed("plugin", OFFER)), "plugin", strict=True)
    early, found, count, said = answer(program)
    assert not early, "importing weft imports no package that offers an algorithm"
    assert found and count == len(ALGORITHMS) + 1 and said == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('no licence')", "bad:offered raised OSError: no licence"),
        ("offered = 1", "bad:offered does not register it"),
        (
            textwrap.dedent(OFFER).replace("def offered", "def split") + "\noffered = split",
            "'split' is registered already",
        ),
    ],
)
def test_a_package_that_cannot_offer_its_algorithm_is_told_of_where_it_is_asked_for(
    installed, programs, source, why
):
    program = programs(LOOK, str(installed("bad", source)), "bad")
    _, found, count, said = answer(program)
    assert not found and count == len(ALGORITHMS)
    assert "algorithm 'offered' of an installed package is missing: " in said
    assert why in said and "; there are doubling, gather, " in said
