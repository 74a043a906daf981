"""`distdl.config`: DistDL's choice of a backend. weft has one, for all devices."""

from __future__ import annotations

import os

from .nn.module import Module, checks_by_default


def get_default_comm() -> str:
    """DistDL's choice of communication: DISTDL_BACKEND_COMM, or "mpi"; has no effect."""
    return os.environ.get("DISTDL_BACKEND_COMM", "mpi")


def get_default_array() -> str:
    """DistDL's choice of arrays: DISTDL_BACKEND_ARRAY, or "numpy"; has no effect."""
    return os.environ.get("DISTDL_BACKEND_ARRAY", "numpy")


def set_backend(
    backend_comm: object = None,
    backend_array: object = None,
    check_input_changed: bool | None = None,
) -> None:
    """Set whether modules check every input for a change. It has no other effect.

    Args:
        backend_comm, backend_array: DistDL's choices of MPI or NCCL, NumPy or CuPy; no effect.
        check_input_changed: False: a module that was prepared stays so, whatever its inputs. None:
            False if the environment has DISTDL_CHECK_INPUT_CHANGED=0, else True.

    Example:
        >>> set_backend()
    """
    if check_input_changed is None:
        check_input_changed = checks_by_default()
    Module._distdl_checks = check_input_changed
