"""Which tests go the way of tensors on an accelerator, too, and which of ranks without Numba.

The kind of ranks "stand-in" is threads whose tensors go by verbs (by posts) and are sorted and
merged as on a device: by torch's operations, and not by the kernels of the host.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from by_verbs import on_verbs
from weft import kernels
from weft.sparse import ALGORITHMS, Sizes
from weft.sparse.choose import serves as can_serve
from weft.testing.spmd import KINDS

_OF_HOST = Sizes(2, 8, 4, 4, 9, 4, 4, compiled=kernels.is_compiled())
_BY_VERBS = ("stand-in", "verbs", "gloo")
_HERE = Path(__file__).parent


def on_stand_in(*given):
    with mock.patch.object(kernels, "on_host", lambda tensor: False):
        return on_verbs(*given)


KINDS["stand-in"] = on_stand_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out algorithms that do not serve there."""

    def serves(item: pytest.Item) -> bool:
        if _HERE not in item.path.parents:  # the hook is given those of all folders
            return True
        given = getattr(item, "callspec", None)
        params = given.params if given else {}
        on, _ = params.get("world", ("", 0))
        names = [params.get(each, "auto") for each in ("name", "algorithm")]
        asked = [name for name in names if name in ALGORITHMS]
        if on in _BY_VERBS:
            return not asked
        return all(can_serve(_OF_HOST, name) for name in asked)

    items[:] = filter(serves, items)
