"""Testing code that runs on many ranks: a test body is one rank's program.

```python
from weft.testing import spmd

@spmd(1, 2, 3, 4, 7, 8)
def test_sum_of_ranks(wire):
    total = weft.sparse_all_reduce(weft.Rows(torch.tensor([0]), torch.ones(1), height=1))
    assert total.values.item() == wire.size
```

Here: `spmd` and `run`, which take the same body to threads and to real processes;
`processes`, which starts new ones as a launcher would, and below it `launch` and `send`, for ranks
that tell what they find as they go; `WireContract`, what a wire must do.
"""

from typing import TYPE_CHECKING, Any

from ..bootstrap.local import launch, send
from ..bootstrap.outcome import RankFailure
from .oracle import expected
from .processes import processes
from .spmd import run, spmd

if TYPE_CHECKING:
    from .contract import WireContract

__all__ = ["RankFailure", "WireContract", "expected", "launch", "processes", "run", "send", "spmd"]


def __getattr__(name: str) -> Any:
    if name == "WireContract":  # when it is asked for, since it is the one that needs pytest
        from .contract import WireContract

        return WireContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
