"""sync_sparsified: means of the largest entries of a program's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import is_a
from ..base.errors import WeftError, check, entry
from ..base.tensors import flattened, plain, unwritable
from ..call.attempt import preparing
from ..comm.named import local
from ..comm.staging import unsendable
from ..group import default, process_group
from ..group.group import Group
from ..rendezvous.world import has_default
from .sparsify import description_of
from .topk import TopK

_NAME = "sync_sparsified"


@entry
def sync_sparsified(tensors: Sequence[Tensor] | Mapping[str, Tensor], state: Any) -> None:
    """Replace each tensor by the mean of the ranks' largest entries, in place. Collective.

    It serves training loops without DistributedDataParallel. Some exchange changes of weights every
    so many steps (local SGD, DiLoCo, SparseLoCo), others gradients. `weft.ddp.TopK` says what is
    sent and what is kept.

    Args:
        tensors: a list, or a dict by name, with the same names, dtypes and shapes on every rank.
            They are real or complex floating-point tensors of 16 bits a number or more. Real ones
            of the state's `min_numel` entries or more are sparsified, the others are averaged
            whole. A DTensor is treated as this rank's part of it.
        state: a `weft.ddp.TopK`, the same one in each call: it keeps the residuals by name (of a
            list: "0", "1", ...), and its group is that of the call.

    Every rank gets the same bits. An entry that no rank sent is zero.

    Raises:
        WeftError: tensors or states differ between ranks or are wrong, or a rank could not select
            its entries, for lack of memory, say; the same text on every rank, naming a rank. The
            tensors are as they were, the residuals too. The next call works. Tensors of several
            dtypes or devices are reduced one kind after the other: those before the error may be
            means already.
        WireError: a peer or a link failed; names the culprit. The group is lost. Each residual is
            as it was or, if the tensor's mean came, as after the step.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     state = weft.ddp.TopK(0.25, min_numel=1, group=group)
        ...     change = torch.tensor([1.0, 8.0, 2.0, 4.0])
        ...     weft.sync_sparsified([change], state)
        ...     later = torch.zeros(4)
        ...     weft.sync_sparsified([later], state)
        ...     return change.tolist(), later.tolist()
        >>> run(2, program)[0]
        ([0.0, 8.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0])
    """
    group: Group
    is_state = is_a(state, TopK)
    if is_state:
        group = state.group
    else:  # ranks that have one are likely of this group, and would wait
        group = process_group.of_group(None) if has_default() else default.current()
    with preparing(group, _NAME):
        if not is_state:
            raise WeftError(f"state is a {type(state).__name__}: pass a weft.ddp.TopK")
        named = _named(tensors)
        names = {name: name for name in named}
        check(state.sparsifier.wrong(named, names))
        kinds: dict[tuple[torch.dtype, str], dict[str, Tensor]] = {}
        for name, tensor in named.items():
            kinds.setdefault((tensor.dtype, tensor.device.type), {})[name] = tensor
        description = description_of(named)

    def job() -> None:
        for given in list(kinds.values()) or [{}]:
            flat = {name: flattened(plain(tensor)) for name, tensor in given.items()}
            state.sparsifier.reduce(group, flat, names, description=description)
            state.note_call(group)
            for name, tensor in given.items():
                if flat[name].data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat[name].view(tensor.shape))

    with torch.no_grad():
        group.worker.call(_NAME, job)


def _named(tensors: object) -> dict[str, Tensor]:
    """The tensors of a caller by name. Raises WeftError: something is wrong with them."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Mapping | Sequence):
        raise WeftError(f"tensors is a {type(tensors).__name__}: pass a list, or a dict by name")
    pairs = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    named: dict[str, Tensor] = {}
    for name, tensor in pairs:
        here = local(tensor) if isinstance(tensor, Tensor) else tensor
        check(unsendable(f"tensor {name!r}", here))
        if not (here.is_floating_point() or here.is_complex()) or here.itemsize < 2:
            raise WeftError(
                f"tensor {name!r} is {here.dtype}: pass numbers of 16 bits at least, no ints"
            )
        if reason := unwritable(here):
            raise WeftError(f"tensor {name!r} is {reason}")
        if str(name) in named:
            raise WeftError(
                f"two keys of tensors are {str(name)!r} as text: pass names that differ"
            )
        named[str(name)] = here
    return named
