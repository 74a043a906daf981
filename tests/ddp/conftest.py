"""What holds for all tests of DDP: ranks that fail have time to say why."""

from __future__ import annotations

import pytest

from weft.base.pace import patient
from weft.bootstrap import local


@pytest.fixture(autouse=True)
def time_to_say_why(monkeypatch):
    """A rank of a busy machine takes longer to end by itself, after another one has failed."""
    monkeypatch.setattr(local, "GRACE", patient(local.GRACE))
