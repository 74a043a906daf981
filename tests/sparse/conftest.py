"""Which tests go the way of tensors on an accelerator, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.sparse import ALGORITHMS, Sizes
from weft.sparse.choose import serves as can_serve

_OF_DEVICE = Sizes(2, 8, 4, 4, 9, 4, 4, staying=True)
_MOST = 4  # ranks; these files, and tests of holders, have 7, too
_SEVEN = ("test_family", "test_tables")
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On those, leave out what is of the CPU alone, and groups as large as other tests have."""

    def serves(item: pytest.Item) -> bool:
        if _HERE not in item.path.parents:  # the hook is given those of all folders
            return True
        given = getattr(item, "callspec", None)
        on, size = given.params.get("world", ("", 0)) if given else ("", 0)
        if on != "device":
            return True
        names = [given.params.get(each, "auto") for each in ("name", "algorithm")]
        most = 7 if item.path.stem in _SEVEN or "holders" in names else _MOST
        asked = [name for name in names if name in ALGORITHMS]
        return size <= most and all(can_serve(_OF_DEVICE, name) for name in asked)

    items[:] = filter(serves, items)
