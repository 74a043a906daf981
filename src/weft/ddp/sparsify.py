"""Sparsified means: each rank sends the largest entries of its tensors and keeps the others.

What a rank keeps of a tensor, its *residual*, it adds to the tensor of the next step: nothing is
lost, but sent later (error feedback). Entries are selected in each tensor by itself (`largest`). So
the selection does not depend on how DistributedDataParallel packs gradients into buckets, which
changes after the first step.

`weft.ddp.TopK` holds a `Sparsifier`, which two calls use: its hook, and `sync_sparsified`.

Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.arguments import as_integer, shown
from ..base.errors import WeftError, check, summed_up
from ..base.tensors import there
from ..call.attempt import preparing
from ..comm.buckets import reduce_dense
from ..group.group import Group
from ..sparse.api import reduce_one
from ..sparse.request import Request, travelling
from ..sparse.rows import Rows
from ..verbs.group import read
from .largest import entries_to_send

_SPELLED = 500  # characters of what all ranks compare of tensors; above, a digest

Owner = str | Tensor
"""What a residual belongs to: a parameter, or the name that `sync_sparsified` was given."""


@dataclass(frozen=True, slots=True)
class Picked:
    """What is sent of a tensor.

    Attributes:
        total: the tensor and its residual; the tensor itself where there is none.
        where: the places of the entries that are sent; None: all.
        sent: the entries as they are sent, which rounding may have changed.
    """

    total: Tensor
    where: Tensor | None
    sent: Tensor

    def left(self) -> Tensor:
        """What is not sent, in float32 or wider, in memory of its own.

        Entries that are infinite or not a number become zero: they would be the largest of all
        later steps. Every rank has seen them, since they are the first to be sent.
        """
        wide = torch.promote_types(self.total.dtype, torch.float32)
        left = self.total.to(wide, copy=True)
        if self.where is None:
            left.sub_(self.sent)
        else:
            left[self.where] -= self.sent.to(wide)
        if not self.sent.is_cpu or not self.sent.isfinite().all():  # where to look is no wait
            left.nan_to_num_(0, 0, 0)
        return left


class Sparsifier:
    """The settings of a `weft.ddp.TopK`, described there, and what is kept from step to step."""

    def __init__(
        self,
        density: float,
        error_feedback: bool,
        min_numel: int,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.density = density
        self.error_feedback = error_feedback
        self.min_numel = min_numel
        self.wire_dtype = wire_dtype
        self.of_names: dict[str, Tensor] = {}
        self.of_parameters = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of another model: it has no residuals of parameters."""
        return {name: each for name, each in vars(self).items() if name != "of_parameters"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.of_parameters = WeakTensorKeyDictionary()

    def settings(self) -> dict[str, str]:
        """The settings, which must be equal on all ranks. Raises WeftError: one is wrong."""
        check(self._wrong_setting())
        names = ("density", "error_feedback", "min_numel", "wire_dtype")
        return {name: str(getattr(self, name)) for name in names}

    def _wrong_setting(self) -> str | None:
        if not _is_number(self.density) or not 0 < self.density <= 1:
            return (
                f"density is {shown(self.density)}: pass the share of entries to send, above 0, "
                "at most 1"
            )
        if not isinstance(self.error_feedback, bool):
            return f"error_feedback is {shown(self.error_feedback)}: pass True or False"
        if as_integer(self.min_numel) < 0:
            return f"min_numel is {shown(self.min_numel)}: pass a whole number, at least 0"
        return None

    def state_dict(self, model: nn.Module | None) -> dict[str, Tensor]:
        """The residuals by name: see `weft.ddp.TopK.state_dict`.

        Raises:
            WeftError: there is no model, and something is kept of parameters.
        """
        if model is None:
            if len(self.of_parameters):
                raise WeftError(
                    "state_dict saves what is kept of parameters under their names: pass the model"
                )
            return dict(self.of_names)
        named = _parameters(model)
        return {
            name: self.of_parameters[each]
            for name, each in named.items()
            if each in self.of_parameters
        }

    def load_state_dict(self, state: Mapping[str, Tensor], model: nn.Module | None) -> None:
        """Continue from what `state_dict` returned, and copy it.

        Raises:
            WeftError: it is something else, or of parameters that the model has not.
        """
        if not isinstance(state, Mapping) or not all(isinstance(e, Tensor) for e in state.values()):
            raise WeftError("load_state_dict takes what state_dict() of a weft.ddp.TopK returned")
        copied = {name: residual.clone() for name, residual in state.items()}
        if model is None:
            self.of_names = copied
            return
        named = _parameters(model)
        if unknown := copied.keys() - named.keys():
            raise WeftError(
                f"something is kept of {min(unknown)!r}, and the model has no parameter of this "
                "name: pass the model whose state was saved"
            )
        self.of_names = {}
        self.of_parameters = WeakTensorKeyDictionary()
        for name, residual in copied.items():
            self.of_parameters[named[name]] = residual

    def wrong(self, tensors: Mapping[str, Tensor], owners: Mapping[str, Owner]) -> str | None:
        """What is wrong with what is kept of these tensors, or None: it may have been loaded."""
        for name, tensor in tensors.items():
            residual = self._residual(owners[name])
            if residual is not None and residual.shape != (tensor.numel(),):
                return (
                    f"{residual.numel()} numbers are kept of tensor {name!r}, which has "
                    f"{tensor.numel()}: have a state for each model, and load what this rank saved "
                    "of it"
                )
        return None

    @torch.no_grad()
    def reduce(
        self,
        group: Group,
        tensors: Mapping[str, Tensor],
        owners: Mapping[str, Owner],
        *,
        description: str | None = None,
        may_be_unused: bool = False,
    ) -> None:
        """Replace tensors by the mean of what the ranks send. Collective; runs on the worker.

        A residual changes when the mean of its tensor has come: what raises before leaves it as it
        was.

        Args:
            group: of the ranks that take part.
            tensors: by name; 1-D, contiguous, of one dtype, on one device.
            owners: what the residual of each belongs to.
            description: of tensors, which ranks compare; None: that of these tensors.
            may_be_unused: whether a rank sends nothing of a tensor of zeros, of which the caller
                may throw the mean away.

        Raises:
            WeftError: as `sync_sparsified`.
        """
        given = {name: flat for name, flat in tensors.items() if flat.numel()}
        # by dtype, length and settings alone, which are equal on all ranks
        in_part = [name for name, flat in given.items() if self._is_sparsified(flat)]
        whole = [name for name, flat in given.items() if not self._is_sparsified(flat)]
        picked: dict[str, Picked] = {}
        rows = _rows_of([], [], torch.empty(0))
        with preparing(group, "sparse_all_reduce"):
            totals = {name: self._total(owners[name], flat) for name, flat in given.items()}
            places = self._places(group, given, totals, may_be_unused)
            for name, total in totals.items():
                picked[name] = self._picked(total, places[name])
            if in_part:
                parts = [picked[name] for name in in_part]
                rows = _rows_of(parts, [given[name].numel() for name in in_part], given[in_part[0]])
            copies = [_whole_of(picked[name], given[name]) for name in whole]
            # takes place even if no tensor is sparsified: it compares the ranks
            request = Request.of(rows, "avg", "auto", self.wire_dtype)
        request.fields = {"tensors": description or description_of(tensors)} | request.fields
        means: Rows = reduce_one(group, request)
        reduce_dense(group, copies, "avg", self.wire_dtype)
        starts = _starts([given[name].numel() for name in in_part])
        bounds = there(starts, means.indices)
        cuts = read(group, torch.searchsorted(means.indices, bounds))
        for number, name in enumerate(in_part):
            mine = slice(cuts[number], cuts[number + 1])
            where = means.indices[mine].long() - starts[number]
            self._keep(owners[name], picked[name])
            given[name].zero_().index_copy_(0, where, means.values[mine])
        for name, mean in zip(whole, copies, strict=True):
            self._keep(owners[name], picked[name])
            given[name].copy_(mean)

    def _is_sparsified(self, flat: Tensor) -> bool:
        """Whether only a part of a tensor is sent."""
        return flat.is_floating_point() and flat.numel() >= self.min_numel and self.density < 1

    def _total(self, owner: Owner, flat: Tensor) -> Tensor:
        """A step's tensor, added to its residual if there is one."""
        residual = self._residual(owner)
        return flat if residual is None else residual.to(flat.device) + flat

    def _places(
        self,
        group: Group,
        given: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        may_be_unused: bool,
    ) -> dict[str, Tensor | None]:
        """Where the entries are that are sent of each tensor; None: all. The host waits once."""
        chosen: list[Tensor | None] = []
        counts: list[Tensor] = []
        for name, flat in given.items():
            places, count = None, torch.ones((), dtype=torch.int64, device=flat.device)
            if self._is_sparsified(flat):
                places, count = entries_to_send(totals[name], self.density)
            if may_be_unused:
                count = count * flat.any()
            chosen.append(places)
            counts.append(count)
        numbers = read(group, torch.stack(counts)) if counts else []
        found: dict[str, Tensor | None] = {}
        for (name, flat), places, number in zip(given.items(), chosen, numbers, strict=True):
            if places is not None:
                found[name] = places[:number]
            elif not number:
                found[name] = torch.empty(0, dtype=torch.int64, device=flat.device)
            else:
                found[name] = None
        return found

    def _picked(self, total: Tensor, where: Tensor | None) -> Picked:
        """What is sent of a tensor: its entries at some places, or all."""
        values = total if where is None else total[where]
        sent = values.to(travelling(total.dtype, self.wire_dtype)).to(total.dtype)
        return Picked(total, where, sent)

    def _keep(self, owner: Owner, picked: Picked) -> None:
        """Keep what was not sent of a tensor; nothing, where all was, as it is."""
        store = self._store(owner)
        if not self.error_feedback or picked.sent is picked.total:
            store.pop(owner, None)
        else:
            store[owner] = picked.left()

    def _residual(self, owner: Owner) -> Tensor | None:
        return self._store(owner).get(owner)

    def _store(self, owner: Owner) -> MutableMapping[Any, Tensor]:
        return self.of_names if isinstance(owner, str) else self.of_parameters


def _whole_of(picked: Picked, flat: Tensor) -> Tensor:
    """What is sent of a tensor that goes whole, in memory that becomes the mean."""
    if picked.where is None:
        return picked.sent.clone()
    return torch.zeros_like(flat)  # nothing is sent


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of several tensors begins that lie one after the other, and the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _rows_of(picked: Sequence[Picked], lengths: Sequence[int], like: Tensor) -> Rows:
    """What is sent of several tensors, as rows of one that has them one after the other.

    Args:
        picked: of each tensor.
        lengths: of the tensors.
        like: a tensor of the dtype and on the device of all.
    """
    starts = _starts(lengths)
    index = torch.int32 if starts[-1] < 2**31 else torch.int64
    places = [
        each.where + first
        for each, first in zip(picked, starts, strict=False)
        if each.where is not None
    ]
    return Rows(
        torch.cat([like.new_empty(0, dtype=torch.int64), *places]).to(index),
        torch.cat([like.new_empty(0), *(each.sent for each in picked)]),
        max(starts[-1], 1),
    )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by name, whether or not it is wrapped.

    Raises:
        WeftError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise WeftError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return dict(inner.named_parameters())


def description_of(tensors: Mapping[str, Tensor]) -> str:
    """A description of tensors, which the ranks compare."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    what = (f"{n!r} {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in tensors.items())
    text = ", ".join(what) or "none"
    return summed_up(text, _SPELLED, f"{len(tensors)} of {numbers} numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
