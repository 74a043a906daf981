"""PyTorch's own tests of a backend, which are installed with it, over weft's.

PyTorch starts processes for each test. Here the same processes run one test after the other, each
in groups of its own. The classes are PyTorch's, unchanged: what they call `gloo` is weft.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import time
import traceback
import types
import unittest
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from weft.base.pace import patient
from weft.testing import processes

SUITE = "torch.testing._internal.distributed.distributed_test"
NOT_OF_GLOO = re.compile("all_to_all|cuda|nccl")  # which PyTorch skips for it
NEEDS_DEVICES = re.compile("@skip_if_(lt_x|no)_gpu")  # above a test
PATIENCE = 20.0  # seconds of an operation, where a test names no other
MEET = 120.0  # seconds between two tests
RANKS = 4  # some of the tests need as many
NOT_WEFTS = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL and a GPU",
    "test_batch_isend_irecv_op_err": "needs a GPU",
    "test_ddp_logging_data_cpu": "compares the name of the backend",
    "test_get_backend": "compares the name of the backend",
    "test_monitored_barrier": "is gloo's alone in torch 2.13",
    "test_new_subgroups_with_group_param": "a rank may leave gloo's group that others still make",
}
"""What may fail, and why: names of tests, or how they begin."""


def test_pytorchs_own_tests_pass(tmp_path):
    folder = tmp_path / "suite"
    folder.mkdir()
    ranks = processes(RANKS, outcomes, str(folder), "cpu:weft", timeout=120)
    failed = {}
    for rank, found in enumerate(ranks):
        for name, outcome in found.items():
            if outcome.startswith("failed") and not name.startswith(tuple(NOT_WEFTS)):
                failed.setdefault(name, f"rank {rank} {outcome}")
    assert failed == {}
    passed = [name for name in ranks[0] if all(found[name] == "passed" for found in ranks)]
    assert len(passed) > 105  # none is skipped that was not


def test_the_manual_lists_what_may_fail():
    page = Path(__file__).parents[2] / "docs" / "backends.md"
    listed = re.findall(r"`(test_\w+)`", page.read_text())
    assert sorted(listed) == sorted(NOT_WEFTS)


def outcomes(folder, backend, wanted=""):
    """How PyTorch's tests end on this rank, those whose name the pattern `wanted` finds.

    Each is "passed", or "skipped: " or "failed: " with the reason. Tests of devices are left out.
    """
    found = {}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=MEET),
        is_master=False,
    )
    suite = _imported(folder)
    with _served_by(backend):
        for name in unittest.TestLoader().getTestCaseNames(_case(suite)):
            if not NOT_OF_GLOO.search(name) and re.search(wanted, name):
                found[name] = _run(suite, name, dist.PrefixStore(f"own/{name}", store))
    return found


def _imported(folder):
    """PyTorch's module, which looks at the environment as it is imported."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/gloo")
    sys.modules.pop(SUITE, None)
    suite = importlib.import_module(SUITE)
    suite.time = types.SimpleNamespace(**{**vars(time), "sleep": _sleep})
    os.environ["BACKEND"] = "mpi"  # then tests of groups run on fewer than eight ranks, too
    return suite


def _sleep(seconds):
    """What PyTorch's tests sleep by; for 0.1 s they do between two looks whether all ranks came."""
    time.sleep(0.01 if seconds == 0.1 else seconds)


@contextmanager
def _served_by(backend):
    """A block in which groups that ask for gloo have another backend."""
    init, new = dist.init_process_group, dist.new_group

    def name(asked):
        return backend if asked == "gloo" else asked

    def init_process_group(backend=None, *args, **options):
        init(name(backend), *args, **options)

    def new_group(ranks=None, timeout=None, backend=None, **options):
        return new(ranks, timeout, name(backend), **options)

    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(dist, "new_group", new_group),
    ):
        yield


def _case(suite):
    return type("Own", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def _run(suite, name, store):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _prepare(suite, Path(os.environ["TEMP_DIR"]).parent / name)
    case = _case(suite)(name)
    case.rank = rank
    case.file_name = f"{os.environ['TEMP_DIR']}/again"
    if not torch.cuda.is_available() and NEEDS_DEVICES.search(
        inspect.getsource(getattr(case, name))
    ):
        return _outcome(suite, case, name)  # that it is skipped, for which no group need be made
    dist.init_process_group(
        suite.BACKEND,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patient(PATIENCE)),
    )
    try:
        _meet("made", store, rank, size)  # gloo's group fails where a rank leaves it before that
        return _outcome(suite, case, name)
    finally:
        _meet("ended", store, rank, size)
        if dist.is_initialized():
            dist.destroy_process_group()


def _prepare(suite, folder):
    """A folder for one test, where PyTorch's own barriers between processes are."""
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    suite.Barrier.barrier_id = 0


def _outcome(suite, case, name):
    reasons = {each.exit_code: each.message for each in suite.TEST_SKIPS.values()}
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {reasons.get(end.code, end.code)}"
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"
    return "passed"


def _meet(where, store, rank, size):
    """Wait until all ranks have come here."""
    store.set(f"{where}/{rank}", "")
    store.wait([f"{where}/{each}" for each in range(size)], timedelta(seconds=MEET))
