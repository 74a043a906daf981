"""Which tests go the way of tensors on an accelerator, too, and which of ranks without Numba."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import kernels
from weft.sparse import ALGORITHMS, Sizes
from weft.sparse.choose import serves as can_serve

_OF_HOST = Sizes(2, 8, 4, 4, 9, 4, 4, compiled=kernels.is_compiled())
_OF_DEVICE = _OF_HOST.but(staying=True)
_MOST = 4  # ranks; these files have 7, too
_SEVEN = ("test_family", "test_tables")
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out algorithms that do not serve there, and on devices groups of many ranks."""

    def serves(item: pytest.Item) -> bool:
        if _HERE not in item.path.parents:  # the hook is given those of all folders
            return True
        given = getattr(item, "callspec", None)
        params = given.params if given else {}
        on, size = params.get("world", ("", 0))
        names = [params.get(each, "auto") for each in ("name", "algorithm")]
        asked = [name for name in names if name in ALGORITHMS]
        if on != "device":
            return all(can_serve(_OF_HOST, name) for name in asked)
        most = 7 if item.path.stem in _SEVEN else _MOST
        return size <= most and all(can_serve(_OF_DEVICE, name) for name in asked)

    items[:] = filter(serves, items)
