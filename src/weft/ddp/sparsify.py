"""Sparsified means: each rank sends the largest entries of its tensors and keeps the others.

What a rank keeps of a tensor it adds to the tensor of the next step (`error_feedback`): nothing is
lost, but sent later. Entries are selected in each tensor by itself (`largest`), not in a bucket. So
the selection does not depend on how DistributedDataParallel packs gradients into buckets, which
changes after the first step. With `total_density`, `selection` then shares only the largest of the
means.

`weft.ddp.TopK` holds a `Sparsifier`, which two calls use: its hook, and `sync_sparsified`.

Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887): sections 3.1 to 3.3
have error feedback, momentum correction with factor masking, and warm-up of the density.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..base.arguments import in_words, shown
from ..base.errors import WeftError, summed_up
from ..comm.buckets import reduce_dense
from ..group.group import Group
from ..sparse import Record, last_call
from ..sparse.api import job_of_one
from ..sparse.request import Request, travelling
from ..sparse.rows import Rows
from .error_feedback import Feedback, Picked
from .largest import entries_to_send
from .selection import mean_of_largest

_log = logging.getLogger("weft")
_WARMUP = 0.25  # the density that warm-up begins with
_SPELLED = 500  # characters of what all ranks compare of tensors; above, a digest


@dataclass(slots=True)
class _Step:
    """What this rank sends in a step.

    Attributes:
        parts: the tensors by name, 1-D. They are written once the means of all have come, so that
            until then a step can be undone.
        may_be_unused: whether nothing is sent of a tensor of zeros, so that all is kept: the caller
            may throw its mean away.
        sparse: the names of those that are sent in part.
        starts: where each of these begins in `rows`, and the end of the last.
        most: how many entries the result has of each of these, at most.
        whole: the names of the others, which are sent whole.
        picked: what is sent of each tensor, by name.
        rows: what is sent of the tensors in part.
        copies: of what is sent of the whole tensors; they become the means.
        trouble: what was raised while this was picked, if anything was.
    """

    parts: dict[str, Tensor]
    may_be_unused: bool = False
    sparse: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    most: list[int] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    picked: dict[str, Picked] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: _rows_of([], [0], torch.empty(0)))
    copies: list[Tensor] = field(default_factory=list)
    trouble: Exception | None = None


@dataclass(eq=False)
class Sparsifier:
    """The settings of a `weft.ddp.TopK`, described there, and what is kept from step to step."""

    density: float
    total_density: float | None
    error_feedback: bool
    momentum: float
    warmup_steps: int
    min_numel: int
    chunk: int | None
    wire_dtype: torch.dtype | None
    _kept: dict[str, Feedback] = field(default_factory=dict, init=False)
    _names: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict, init=False)
    _named: Counter[str] = field(default_factory=Counter, init=False)  # parameters, by dtype
    # of parameters whose first bucket has not come; each parameter by its id
    _loaded: dict[int, tuple[Tensor, Feedback]] = field(default_factory=dict, init=False)
    _partly: bool = field(default=False, init=False)  # whether a tensor was sent in part
    _largest: int = field(default=0, init=False)  # entries of a tensor, so far
    _is_told: bool = field(default=False, init=False)

    def __getstate__(self) -> dict[str, Any]:
        # parameters are known by their ids, which are of this process
        gone = {name for _, name in self._names.values()}
        kept = {name: each for name, each in self._kept.items() if name not in gone}
        return vars(self) | {"_kept": kept, "_names": {}, "_named": Counter(), "_loaded": {}}

    def settings(self) -> tuple[dict[str, str], str | None]:
        """The settings, which must be equal on all ranks; and what is wrong with them, or None."""
        values = {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        error = wrong_density("density", self.density)
        if self.total_density is not None:
            error = error or wrong_density("total_density", self.total_density)
        return values, error or self._wrong_setting()

    def _wrong_setting(self) -> str | None:
        if not isinstance(self.error_feedback, bool):
            return f"error_feedback is {shown(self.error_feedback)}: pass True or False"
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            return f"momentum is {shown(self.momentum)}: pass a number from 0, below 1"
        if self.momentum and not self.error_feedback:
            return f"momentum is {self.momentum!r}, which corrects residuals: use error_feedback"
        for name, least in (("warmup_steps", 0), ("min_numel", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is None and name == "chunk":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                return f"{name} is {shown(value)}: pass a whole number, at least {least}"
        return None

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """The names of a bucket's parameters in this process: dtype, and number from the last back.

        They are equal on all ranks. Only parameters that are trained have one, which may be others
        when a job goes on.

        In the first backward the buckets of DistributedDataParallel come from the last parameters
        to the first; in each bucket the parameters are in the model's order. Numbering them from
        the end of each bucket gives numbers that do not depend on where the buckets are cut.
        """
        for parameter in reversed(parameters):
            if self._name_of(parameter) is None:
                kind = str(parameter.dtype).removeprefix("torch.")
                self._named[kind] += 1
                name = f"{kind} -{self._named[kind]}"
                self._names[id(parameter)] = weakref.ref(parameter), name
                if id(parameter) in self._loaded:
                    self._kept[name] = self._loaded.pop(id(parameter))[1]
        return [self._names[id(parameter)][1] for parameter in parameters]

    def _name_of(self, parameter: Tensor) -> str | None:
        """A parameter's name here; None: it has none yet."""
        known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:  # the id may be that of one that is gone
            return None
        return known[1]

    def state_dict(self, model: nn.Module | None) -> dict[str, dict[str, Any]]:
        """What is kept, by kind and name of the tensor: see `weft.ddp.TopK.state_dict`.

        Raises:
            WeftError: there is no model, and something is kept of parameters.
        """
        kept = self._kept_by_name(model)
        return {
            "residual": {n: each.residual for n, each in kept.items() if each.residual is not None},
            "velocity": {n: each.velocity for n, each in kept.items() if each.velocity is not None},
            "steps": {n: each.steps for n, each in kept.items()},
        }

    def _kept_by_name(self, model: nn.Module | None) -> dict[str, Feedback]:
        if model is not None:
            found = {name: self._kept_of(each) for name, each in _parameters(model).items()}
            return {name: each for name, each in found.items() if each is not None}
        if self._loaded or any(name in self._kept for _, name in self._names.values()):
            raise WeftError(
                "state_dict saves what is kept of parameters under their names: pass the model"
            )
        return self._kept

    def _kept_of(self, parameter: Tensor) -> Feedback | None:
        if id(parameter) in self._loaded:
            return self._loaded[id(parameter)][1]
        name = self._name_of(parameter)
        return None if name is None else self._kept.get(name)

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], model: nn.Module | None
    ) -> None:
        """Continue from what `state_dict` returned, and copy it.

        Raises:
            WeftError: it is something else, or of parameters that the model has not.
        """
        kinds = {"residual": Tensor, "velocity": Tensor, "steps": int}
        if (
            not isinstance(state, Mapping)
            or {*state} != {*kinds}
            or not all(isinstance(each, Mapping) for each in state.values())
            or not all({*each} <= {*state["steps"]} for each in state.values())
            or not all(isinstance(e, kinds[kind]) for kind in kinds for e in state[kind].values())
        ):
            raise WeftError("load_state_dict takes what state_dict() of a weft.ddp.TopK returned")
        parameters = {} if model is None else _parameters(model)
        unknown = state["steps"].keys() - parameters.keys()
        if model is not None and unknown:
            raise WeftError(
                f"something is kept of {min(unknown)!r}, and the model has no parameter of this "
                "name: pass the model whose state was saved"
            )
        residual, velocity = (
            {name: each.clone() for name, each in state[kind].items()}
            for kind in ("residual", "velocity")
        )
        self._kept, self._loaded = {}, {}
        for name, steps in state["steps"].items():
            feedback = Feedback(residual.get(name), velocity.get(name), steps)
            parameter = parameters.get(name)
            if parameter is None:  # a tensor of `sync_sparsified`
                self._kept[name] = feedback
            elif known := self._name_of(parameter):
                self._kept[known] = feedback
            else:
                self._loaded[id(parameter)] = parameter, feedback

    @torch.no_grad()
    def reduce(
        self,
        group: Group,
        tensors: Mapping[str, Tensor],
        algorithm: str,
        density: float | None = None,
        error: str | None = None,
        description: str | None = None,
        may_be_unused: bool = False,
    ) -> Record | None:
        """Replace tensors by the mean of what the ranks send. Collective; runs on the worker.

        Args:
            group: of the ranks that take part.
            tensors: by name; 1-D, contiguous, of one dtype, on one device.
            algorithm: of `weft.sparse_all_reduce`.
            density: used in place of the setting.
            error: what is wrong with this rank's call, or None; raised on every rank.
            description: of tensors, which ranks compare; None: that of these tensors.
            may_be_unused: whether a rank sends nothing of a tensor of zeros, of which the caller
                may throw the mean away.

        Returns:
            The record of the sparse call.

        Raises:
            WeftError: as `sync_sparsified`.
        """
        asked = self.density if density is None else density
        error = error or wrong_density("density", asked) or self._wrong_algorithm(algorithm)
        parts: dict[str, Tensor] = {}
        if error is None:
            parts = {name: flat for name, flat in tensors.items() if flat.numel()}
        step = _Step(parts, may_be_unused)
        self._sort(step, asked)
        with self._as_it_was_if_it_raises(parts):
            self._pick_all(step, density)
            if step.trouble is not None:
                error = in_words(step.trouble)
            # takes place even if no tensor is sparsified: it compares the ranks
            request = Request.of(step.rows, "avg", algorithm, self.wire_dtype)
            request.error = error or request.error
            compared = {"tensors": description or described(tensors), "density": str(density)}
            if self.total_density is not None:
                # it falls with the steps, which may have been loaded
                most = summed_up(str(step.most), _SPELLED, f"{sum(step.most)}")
                compared["entries of the result"] = most
            request.fields = compared | request.fields
            total = self._share_sparse(group, step, request)
            reduce_dense(group, step.copies, "avg", self.wire_dtype)
            self._take_means(step, total)
        return last_call(group)

    def _sort(self, step: _Step, density: float) -> None:
        """Sort the tensors of a step into those that are sent in part and those sent whole."""
        for name, flat in step.parts.items():
            if self._is_sparsified(flat, density):
                step.sparse.append(name)
                step.starts.append(step.starts[-1] + flat.numel())
                step.most.append(self._most(name, flat.numel()))
                self._partly = True
            else:
                step.whole.append(name)
            self._largest = max(self._largest, flat.numel())

    def _pick_all(self, step: _Step, density: float | None) -> None:
        """Add each tensor to what is kept of it, and pick what is sent.

        An error becomes the step's trouble: raised here, it would leave the other ranks waiting.
        """
        try:
            for name in step.sparse:
                step.picked[name] = self._picked(step, name, density)
            for name in step.whole:
                step.picked[name] = self._picked(step, name, density, whole=True)
                # what is sent may be the memory of the tensor or of what is kept
                step.copies.append(step.picked[name][2].clone())
            if step.sparse:
                picked = [step.picked[name] for name in step.sparse]
                step.rows = _rows_of(picked, step.starts, step.parts[step.sparse[0]])
        except Exception as caught:
            step.trouble = caught

    def _share_sparse(self, group: Group, step: _Step, request: Request) -> Rows:
        """The means of what the ranks send of tensors in part; collective.

        Raises:
            WeftError: also if a rank could not pick what it sends.
        """
        try:
            if self.total_density is None:
                result: Rows = job_of_one(group, request).run()
                return result
            return mean_of_largest(group, request, step.starts, step.most)
        except WeftError as raised:
            if step.trouble is not None:
                raise raised from step.trouble
            raise
        finally:
            # its traceback has a frame with this step: a cycle, which would keep tensors
            step.trouble = None

    def _take_means(self, step: _Step, total: Rows) -> None:
        """Take what was sent out of what is kept, and write the means to the tensors.

        Args:
            step: whose copies are the means of the tensors that were sent whole.
            total: the means of the others.
        """
        cuts = torch.searchsorted(total.indices, total.indices.new_tensor(step.starts)).tolist()
        for number, name in enumerate(step.sparse):
            mine = slice(cuts[number], cuts[number + 1])
            where = total.indices[mine].long() - step.starts[number]
            shared = None if self.total_density is None else where
            self._kept[name].take_out(*step.picked[name], shared)
            step.parts[name].zero_().index_copy_(0, where, total.values[mine])
        for name, mean in zip(step.whole, step.copies, strict=True):
            self._kept[name].take_out(*step.picked[name])
            step.parts[name].copy_(mean)

    @contextmanager
    def _as_it_was_if_it_raises(self, parts: Mapping[str, Tensor]) -> Iterator[None]:
        """Whatever the block raises: undo what it added to residuals of tensors without a mean."""
        known = {*self._kept}
        try:
            yield
        except BaseException:
            for name in parts:
                kept = self._kept.get(name)
                if kept is None:
                    continue
                if kept.added:
                    kept.undo(parts[name], self.momentum)
                if name not in known and not kept.steps:
                    del self._kept[name]
            raise

    def _is_sparsified(self, flat: Tensor, density: float) -> bool:
        """Whether only a part of a tensor is sent.

        It depends on dtype, shape and settings alone, which are equal on all ranks.
        """
        return flat.is_floating_point() and flat.numel() >= self.min_numel and density < 1

    def tell_if_whole(self) -> None:
        """Log it, once, if no tensor so far had enough entries to be sent in part."""
        if self._partly or self._is_told or not self._largest or self.density >= 1:
            return
        self._is_told = True
        _log.warning(
            "TopK sends everything whole: the largest tensor has %d entries, and min_numel is %d: "
            "pass a smaller min_numel, if these are to be sparsified",
            self._largest,
            self.min_numel,
        )

    def wrong_of_parameters(self, parts: Mapping[str, Tensor]) -> str | None:
        """What is wrong with what is kept of a model's parameters, of which these are some."""
        others = self._kept.keys() - {name for _, name in self._names.values()}
        if others:
            return (
                f"something is kept of {min(others)!r}, which is no parameter's name here: have a "
                "state for each model, and pass the model to load_state_dict"
            )
        return self.wrong(parts)

    def wrong(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with what is kept of these tensors, or None: it may have been loaded."""
        for name, tensor in tensors.items():
            kept = self._kept.get(name) or Feedback()
            for each in (kept.residual, kept.velocity):
                if each is not None and each.shape != (tensor.numel(),):
                    return (
                        f"{each.numel()} numbers are kept of tensor {name!r}, which has "
                        f"{tensor.numel()}: "
                        "have a state for each model, and load what this rank saved of it"
                    )
        return None

    def _picked(
        self, step: _Step, name: str, density: float | None, *, whole: bool = False
    ) -> Picked:
        """Add a step's tensor to what is kept of it, and select what is sent."""
        flat = step.parts[name]
        kept = self._kept.setdefault(name, Feedback())
        sends = travelling(flat.dtype, self.wire_dtype)
        wide = torch.promote_types(flat.dtype, torch.float32)
        # what was kept of a tensor is sent with it, if it is now sent whole
        keeps_none = whole and sends == flat.dtype and kept.residual is None
        keeps = self.error_feedback and not keeps_none
        for kind, wanted in (("residual", keeps), ("velocity", bool(self.momentum))):
            had = getattr(kept, kind)
            made = torch.zeros_like(flat, dtype=wide) if had is None else had.to(flat.device, wide)
            setattr(kept, kind, made if wanted else None)
        share = self._density_at(self.density, kept.steps) if density is None else density
        waits = step.may_be_unused and not flat.any()
        total = kept.add(flat, self.momentum)
        if waits and whole:
            return None, total, torch.zeros_like(flat)
        if waits:
            total = torch.zeros_like(total)  # of which no entry is sent
        where = None if whole else entries_to_send(total, share, self.chunk)
        values = total if where is None else total[where]
        return where, values, values.to(sends).to(flat.dtype)

    def _most(self, name: str, numel: int) -> int:
        """How many entries of a tensor the result has at most in this step."""
        if self.total_density is None:
            return numel
        kept = self._kept.get(name) or Feedback()
        return math.ceil(self._density_at(self.total_density, kept.steps) * numel)

    def _density_at(self, density: float, step: int) -> float:
        """A density in a step, counted from 0: in warm-up it falls by the same factor in each."""
        first = max(density, _WARMUP)
        done = 1.0 if step >= self.warmup_steps else step / self.warmup_steps
        return float(first * (density / first) ** done)

    def _wrong_algorithm(self, algorithm: str) -> str | None:
        if self.total_density is None or (type(algorithm) is str and algorithm == "auto"):
            return None
        return f"algorithm is {shown(algorithm)}, and total_density has its own: leave it 'auto'"


def _rows_of(picked: Sequence[Picked], starts: Sequence[int], like: Tensor) -> Rows:
    """What is sent of several tensors, as rows of one that has them one after the other.

    Args:
        picked: of each tensor.
        starts: the first index of each tensor, and the end of the last.
        like: a tensor of the dtype and on the device of all.
    """
    index = torch.int32 if starts[-1] < 2**31 else torch.int64
    places = [where for where, _, _ in picked if where is not None]
    indices = [where.add(first) for where, first in zip(places, starts, strict=False)]
    return Rows(
        torch.cat([like.new_empty(0, dtype=torch.int64), *indices]).to(index),
        torch.cat([like.new_empty(0), *(sent for *_, sent in picked)]),
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


def described(tensors: Mapping[str, Tensor]) -> str:
    """A description of tensors, which the ranks compare."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    what = (f"{n!r} {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in tensors.items())
    text = ", ".join(what) or "none"
    return summed_up(text, _SPELLED, f"{len(tensors)} of {numbers} numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_density(name: str, density: Any) -> str | None:
    """What is wrong with a density of this name, or None."""
    if _is_number(density) and 0 < density <= 1:
        return None
    return f"{name} is {shown(density)}: pass the share of entries to send, above 0, at most 1"
