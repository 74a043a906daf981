"""What holds for all tests: one thread a rank, and contracts whose asserts explain themselves."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    def held() -> set[object]:
        gc.collect()
        opened: set[object] = set(threading.enumerate())
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one of this listing
                opened.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        return opened

    before = held()
    yield
    assert held() - before == set()


@pytest.fixture
def nothing_left() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A block, after which no file, socket or thread is there that was not there before.

    What an earlier test left may go meanwhile: a comparison of counts would hold it against this
    block, or let it hide what the block left.
    """
    return _nothing_left


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread a rank"
