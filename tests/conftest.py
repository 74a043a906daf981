"""What holds for all tests: one thread a rank, and contracts whose asserts explain themselves."""

from __future__ import annotations

import os
import signal

import pytest

# A shell's background job has Ctrl-C ignored, and so would have every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Figures of a network, so that no test spends its time measuring one, as tests/wire/test_link.py
# does.
os.environ.setdefault("WEFT_LINK", "50,10")

pytest.register_assert_rewrite("weft.testing.contract")

import torch  # noqa: E402  # after the line above, which must come before weft.testing is imported
from hypothesis import settings  # noqa: E402

# Ranks share the cores with each other; more threads only make the timing of tests uneven.
torch.set_num_threads(1)

# No deadline for one example: a machine that is busy with other things is no defect.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread a rank"
