"""The contract of a wire as a pytest class, from which a test of a wire inherits.

```python
class TestStreams(WireContract):
    @pytest.fixture
    def run(self):
        return ranks_as_processes("streams")
```
"""

from __future__ import annotations

import pytest

from ..wire.interface import Features
from .wires import NUMBERS, Run, check_wire


class WireContract:
    """Inherit from it and define the fixture `run`, as the module's docstring shows.

    Each clause of `check_wire` is a test, such as `test_clause[order]`.

    Attributes:
        features: of the wire; clauses that are not for these are skipped.
        thorough: try those clauses, too, that take gigabytes of memory.
    """

    features = Features()
    thorough = False

    @pytest.fixture
    def run(self) -> Run:
        raise NotImplementedError("a test of a wire says with the fixture run how ranks start")

    @pytest.mark.parametrize("clause", NUMBERS.values(), ids=NUMBERS)
    def test_clause(self, run: Run, clause: int) -> None:
        __tracebackhide__ = True  # the text says in which line of the clause
        (outcome,) = check_wire(run, self.features, clauses=[clause], thorough=self.thorough)
        if outcome.skipped:
            pytest.skip(outcome.skipped)
