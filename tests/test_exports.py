"""What a person finds in `weft` is what `weft.__all__` names, in order, with a docstring."""

from types import ModuleType

import weft


def test_exported_names():
    found = {name for name, thing in vars(weft).items() if not isinstance(thing, ModuleType)}
    things = {name: getattr(weft, name) for name in weft.__all__}
    assert {name for name in found if not name.startswith("_")} <= set(things)
    assert list(things) == sorted(weft.__all__)
    assert all(thing.__doc__ for thing in things.values())
