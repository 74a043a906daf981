"""No two kinds of messages have one channel, and every post of weft's own names its channel."""

from __future__ import annotations

import ast
from pathlib import Path

import weft
from weft.group import channels

SOURCE = Path(weft.__file__).parent
NAMES = {name for name in vars(channels) if name.isupper()}


def numbers():
    for name in NAMES - {"OWN"}:
        given = getattr(channels, name)
        yield from given if isinstance(given, tuple) else (given,)


def test_no_two_are_the_same():
    found = list(numbers())
    assert len(found) == len(set(found)) > 10


def test_an_algorithm_of_a_program_may_take_any_number_below_wefts_own():
    of_algorithms = {channels.LISTS, channels.VALUES, channels.SUMS}
    assert all(number in of_algorithms or number >= channels.OWN for number in numbers())


def channels_of_posts(tree):
    """What each post with a channel says it is, as it is spelled."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = [each.value for each in node.keywords if each.arg == "channel"]
            if node.func.attr == "post" and (len(node.args) == 3 or given):
                yield ast.unparse(given[0] if given else node.args[2])


def test_posts_name_them():
    rooms = ("call", "comm", "nn", "schedules", "sparse")
    files = [path for room in rooms for path in sorted((SOURCE / room).rglob("*.py"))]
    files += [SOURCE / "group" / "group.py"]
    found = {
        spelled for path in files for spelled in channels_of_posts(ast.parse(path.read_text()))
    }
    kept = {"self._channel", "channel"}  # of a ring, which is given one; of `Group.post` itself
    assert {spelled.split("[")[0] for spelled in found} - kept <= NAMES
    assert found >= {"OPENINGS", "LISTS", "CHAIN", "LAYERS"}
