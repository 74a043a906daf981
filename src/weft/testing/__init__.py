"""Tools to test code that runs on several ranks: the body of a test is the program of one rank.

```python
from weft.testing import spmd

@spmd(1, 2, 3, 4, 7, 8)
def test_sum_of_ranks(group):
    total = weft.sparse_all_reduce(weft.Rows(torch.tensor([0]), torch.ones(1), height=1))
    assert total.values.item() == group.size
```

`spmd` and `run` run a body on ranks that are threads, or processes that are kept between tests.
`processes` starts new processes, as a launcher does. `launch` does this, too; its ranks can report
to the caller while they run, by `send`. `expected` computes the result of a sparse all-reduce in
one process, and `check_algorithm` tries an algorithm against it. `gloo_of_one_thread`
is a backend of torch.distributed to compare with, which does not corrupt memory where torch's own
may. `check_wire` tries whether a wire does what `weft.wire.interface.Wire` says, on ranks that
`ranks_as_processes` or `ranks_as_threads` starts; `make_wires` makes all wires of a group in one
process. `WireContract` has the clauses of `check_wire` as a class of pytest's. All but it and
`spmd` work without pytest.
"""

from typing import TYPE_CHECKING, Any

from ..bootstrap.local import launch, send
from ..bootstrap.outcome import RankFailure
from .algorithms import check_algorithm
from .clauses import Outcome
from .oracle import expected
from .processes import processes
from .reference import gloo_of_one_thread
from .spmd import run, spmd
from .wire_processes import ranks_as_processes
from .wires import check_wire, make_wires, ranks_as_threads

if TYPE_CHECKING:
    from .wire_contract import WireContract

__all__ = [
    "Outcome",
    "RankFailure",
    "WireContract",
    "check_algorithm",
    "check_wire",
    "expected",
    "gloo_of_one_thread",
    "launch",
    "make_wires",
    "processes",
    "ranks_as_processes",
    "ranks_as_threads",
    "run",
    "send",
    "spmd",
]


def __getattr__(name: str) -> Any:
    # imported at its first use, because it imports pytest
    if name == "WireContract":
        from .wire_contract import WireContract

        return WireContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
