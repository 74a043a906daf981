"""The backends of torch.distributed that `weft.init` can start: what each needs, what to install.

A backend is the name that a person gives; its spec is what `init_process_group` is told, in which
CPU tensors have a backend of their own where the named one is for another device. To add one,
write its spec to `SPECS`, and what it needs to `_lacking`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ..backend import WEFT
from ..base.arguments import is_a, shown
from ..base.errors import WeftError


def spec(backend: str) -> str:
    """What torch.distributed calls a backend.

    Raises:
        WeftError: there is no such backend, or it is not on this machine.

    Example:
        >>> spec("gloo")
        'gloo'
    """
    _check_known(backend)
    if lacking := _lacking(backend):
        raise WeftError(f"backend {backend!r} {lacking}")
    return SPECS[backend]


def is_in(backend: str, there: str) -> bool:
    """Whether a group whose spec is `there` has a backend.

    Raises:
        WeftError: there is no such backend.

    Example:
        >>> is_in("nccl", "cpu:gloo,cuda:nccl"), is_in("mpi", "gloo"), is_in("ucc", "gloo")
        (True, True, False)
    """
    _check_known(backend)
    names = {part.rpartition(":")[2] for part in there.split(",")}
    return backend in names or (backend == "mpi" and "gloo" in names)


def able() -> tuple[str, ...]:
    """What this process's devices would choose, best first; gloo is always among them."""
    found = [name for name in ("nccl", "xccl") if not _lacking(name)]
    return (*found, "gloo")


def best(abilities: Iterable[Sequence[str]]) -> str:
    """The first choice that all ranks have.

    Example:
        >>> best([("nccl", "gloo"), ("gloo",)])
        'gloo'
    """
    first, *others = abilities
    return next(name for name in first if all(name in each for each in others))


def _lacking(backend: str) -> str:
    """What a backend needs and this machine has not; empty if nothing."""
    version = torch.version.__version__
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        lacks = "no GPU" if dist.is_nccl_available() else f"torch {version}"
        return (
            f"needs a GPU and a CUDA build of torch, and there is {lacks}: use gloo, or install "
            "torch as pytorch.org says for your CUDA"
        )
    xpu = hasattr(torch, "xpu") and torch.xpu.is_available()
    if backend == "xccl" and not (xpu and dist.is_xccl_available()):
        return (
            f"needs an Intel GPU and an XPU build of torch, and there is torch {version}: use "
            "gloo, or pip install torch --index-url https://download.pytorch.org/whl/xpu"
        )
    if backend == "ucc" and not dist.is_ucc_available():
        return f"is not in this build of torch ({version}): use gloo, or build torch with USE_UCC=1"
    if backend == "ccl":
        try:
            importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend
        except ImportError:
            return (
                "needs oneCCL's bindings, which are not installed: pip install "
                f"oneccl_bindings_for_pytorch, in the version of this torch ({version}), or use "
                "gloo"
            )
    return ""


def _check_known(backend: str) -> None:
    if not is_a(backend, str) or backend not in SPECS:
        raise WeftError(f"backend {shown(backend)} is unknown: use one of {', '.join(SPECS)}")


SPECS = {
    "gloo": "gloo",
    "weft": f"cpu:{WEFT}",
    "nccl": "cpu:gloo,cuda:nccl",
    "xccl": "cpu:gloo,xpu:xccl",
    "ccl": "ccl",
    "ucc": "ucc",
    "mpi": "gloo",  # says who started the ranks: torch's own "mpi" is not in its wheels
}
