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
may. All but `spmd` works without pytest.
"""

from ..bootstrap.local import launch, send
from ..bootstrap.outcome import RankFailure
from .algorithms import check_algorithm
from .oracle import expected
from .processes import processes
from .reference import gloo_of_one_thread
from .spmd import run, spmd

__all__ = [
    "RankFailure",
    "check_algorithm",
    "expected",
    "gloo_of_one_thread",
    "launch",
    "processes",
    "run",
    "send",
    "spmd",
]
