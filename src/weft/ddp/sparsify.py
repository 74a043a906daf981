"""Sparsified means: each rank sends the largest entries of its tensors and keeps the others.

What a rank keeps of a tensor is its *residual*. The rank adds it to the tensor of the next step, so
nothing is lost, but sent later (error feedback). This file has the selection, the residuals and
`sync_sparsified`; `weft.ddp.TopK` uses them for the gradients of DistributedDataParallel.

Entries are selected in each tensor by itself, not in a bucket. So the selection does not depend on
how DistributedDataParallel packs gradients into buckets, which changes after the first step.
Without `chunk`, a rank's selection does not sort the tensor: it estimates a threshold from a
sample, so low that somewhat more entries pass it than are needed, and selects exactly among those.
With `total_density`, `selection` then shares only the largest of the means.

Sources: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887): sections 3.1 to 3.3
have error feedback, momentum correction with factor masking, and warm-up of the density; section 5
has the threshold from a sample. Sarfi et al., "Communication efficient LLM pre-training with
SparseLoCo" (2025, arXiv 2508.15706), has selection in chunks.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import in_words, is_a, shown
from ..base.errors import WeftError, entry, summed_up
from ..base.tensors import flattened, plain
from ..call.attempt import confess, preparing
from ..comm.buckets import reduce_dense
from ..comm.named import expanded_dims, local
from ..comm.rounding import narrowed
from ..comm.staging import unsendable
from ..group import default, process_group
from ..group.group import Group
from ..sparse import Record, last_call
from ..sparse.api import job_of_one
from ..sparse.request import Request, travelling
from ..sparse.rows import Rows
from .selection import mean_of_largest

_log = logging.getLogger("weft")
_NAME = "sync_sparsified"
_WARMUP = 0.25  # the density that warm-up begins with
_SPELLED = 500  # characters of what all ranks compare of tensors; above, a digest
_SAMPLED = 64  # about so many entries of a sample reach its threshold
# A threshold aims at this multiple of the entries that are needed; the second is tried if too few
# pass the first. If too few pass that one, too, all entries that are not zero are candidates.
AIMS = (1.5, 5.0)
_GOLDEN = 0.6180339887498949


@entry
def sync_sparsified(
    tensors: Sequence[Tensor] | Mapping[str, Tensor], state: Any, density: float | None = None
) -> None:
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
        density: used in this call in place of the state's, in warm-up, too; the same on every rank.
            With 1 all is sent, with what was kept.

    Every rank gets the same bits. An entry that no rank sent is zero, and so is one that the
    state's `total_density` leaves out.

    Raises:
        WeftError: tensors, states or densities differ between ranks or are wrong, or a rank could
            not select its entries, for lack of memory, say; the same text on every rank, naming a
            rank. The tensors are as they were, the residuals too, up to rounding (and zero where a
            tensor is infinite or NaN). The next call works. Tensors of several dtypes or devices
            are reduced one kind after the other: those before the error may be means already.
        WireError: a peer or a link failed; names the culprit. The group is lost. Tensors and
            residuals are as with a WeftError. With any other error each residual is as it was or,
            if the tensor's mean came, as after the step.

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
    sparsifier = _sparsifier_of(state)
    if sparsifier is not None:
        group = state.group
    else:  # ranks that have one are likely of this group, and would wait
        group = process_group.of_group(None) if process_group.has_default() else default.current()
    with preparing(group, _NAME):
        named, error = _named(tensors)
        if sparsifier is None:
            error = f"state is a {type(state).__name__}: pass a weft.ddp.TopK"
        elif error is None:
            error = sparsifier.wrong(named)
        if error is None and density is not None:
            error = _wrong_density("density", density)
            density = None if error else float(density)
        kinds: dict[tuple[torch.dtype, str], dict[str, Tensor]] = {}
        for name, tensor in named.items():
            kinds.setdefault((tensor.dtype, tensor.device.type), {})[name] = tensor
        description = _described(named)

    def job() -> None:
        if error is not None:  # of any of the tensors, before one is reduced
            confess(group, _NAME, None, error)
        for given in list(kinds.values()) or [{}]:
            flat = {name: flattened(plain(tensor)) for name, tensor in given.items()}
            record = state.sparsifier.reduce(
                group, flat, state.algorithm, density, description=description
            )
            if record is not None:
                state.calls.append(record)
            for name, tensor in given.items():
                if flat[name].data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat[name].view(tensor.shape))
        if group.rank == 0 and (density is None or density < 1):
            state.sparsifier.tell_if_whole()

    with torch.no_grad():
        group.worker.call(_NAME, job)


def _sparsifier_of(state: object) -> Sparsifier | None:
    """What a `weft.ddp.TopK` has; None: it is something else."""
    try:
        found = getattr(state, "sparsifier", None)
    except Exception:  # a caller's object may raise anything
        return None
    return found if is_a(found, Sparsifier) else None


def _named(tensors: object) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a caller by name, and what is wrong with them, or None."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Mapping | Sequence):
        return {}, f"tensors is a {type(tensors).__name__}: pass a list, or a dict by name"
    pairs = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    named: dict[str, Tensor] = {}
    for name, tensor in pairs:
        here = local(tensor) if isinstance(tensor, Tensor) else tensor
        if error := unsendable(f"tensor {name!r}", here):
            return {}, error
        if not (here.is_floating_point() or here.is_complex()) or here.itemsize < 2:
            return {}, f"tensor {name!r} is {here.dtype}: pass numbers of 16 bits at least, no ints"
        if here.is_inference() and not torch.is_inference_mode_enabled():
            return {}, f"tensor {name!r} is of inference mode: pass a clone() of it"
        if dims := expanded_dims(here):
            return {}, f"tensor {name!r} is expanded along {dims}: pass a clone() of it"
        if str(name) in named:
            return {}, f"two keys of tensors are {str(name)!r} as text: pass names that differ"
        named[str(name)] = here
    return named, None


def _described(tensors: Mapping[str, Tensor]) -> str:
    """A description of tensors, which the ranks compare."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    what = (f"{n!r} {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in tensors.items())
    text = ", ".join(what) or "none"
    return summed_up(text, _SPELLED, f"{len(tensors)} of {numbers} numbers")


_Picked = tuple[Tensor | None, Tensor, Tensor]
"""Of the entries of a tensor that are sent: their places (None: all entries are sent), their
values, and the values as they are sent, which rounding may have changed."""


@dataclass(slots=True)
class _Kept:
    """What is kept of a tensor from step to step.

    Attributes:
        residual: what was not sent, 1-D, in float32 or wider; None without error feedback.
        velocity: of momentum correction, likewise; None without momentum.
        steps: how often the tensor was reduced.
        is_under_way: whether a step's tensor was added, and its mean has not come.
    """

    residual: Tensor | None = None
    velocity: Tensor | None = None
    steps: int = 0
    is_under_way: bool = False

    def added(self, flat: Tensor, momentum: float) -> Tensor:
        """Add this step's tensor to what is kept. The caller must not write to the sum returned."""
        total = flat
        if self.velocity is not None:
            total = self.velocity.mul_(momentum).add_(flat)
        if self.residual is not None:
            total = self.residual.add_(total)
        self.steps += 1
        self.is_under_way = True
        return total

    def sent(
        self, where: Tensor | None, values: Tensor, sent: Tensor, shared: Tensor | None = None
    ) -> None:
        """Take what was sent out of what is kept.

        Entries that are infinite or not a number become zero here, also those that were not shared:
        they would be the largest of all later steps. Every rank has seen them or, since they are
        the first to be shared, a result that is full of others.

        Args:
            where: the places of what was sent; None: all entries.
            values: the values there.
            sent: the values as they were sent.
            shared: the places of the result, if it has not all that was sent: what it lacks is
                kept, and sent again.
        """
        kept = [each for each in (self.residual, self.velocity) if each is not None]
        is_finite = not kept or bool(sent.isfinite().all())
        if where is not None and shared is not None:
            found = torch.isin(where, shared, assume_unique=True)
            where, values, sent = where[found], values[found], sent[found]
        if self.residual is not None and where is None:
            torch.sub(values, sent, out=self.residual)
        elif self.residual is not None:
            self.residual[where] = values - sent
        self.is_under_way = False
        if self.velocity is not None and where is not None:  # factor masking
            self.velocity[where] = 0
        if not is_finite:
            for each in kept:
                each.nan_to_num_(0, 0, 0)

    def undone(self, flat: Tensor, momentum: float) -> None:
        """Undo the last `added`, up to rounding: no mean came of it."""
        if self.residual is not None:
            added = flat if self.velocity is None else self.velocity
            self.residual.sub_(added).nan_to_num_(0, 0, 0)
        if self.velocity is not None:
            self.velocity.sub_(flat).div_(momentum).nan_to_num_(0, 0, 0)
        self.steps -= 1
        self.is_under_way = False


@dataclass(slots=True)
class _Step:
    """What this rank sends in a step.

    Attributes:
        parts: the tensors by name, 1-D. They are written once the means of all have come, so that
            until then a step can be undone.
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
    sparse: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    most: list[int] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    picked: dict[str, _Picked] = field(default_factory=dict)
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
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)
    _names: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict, init=False)
    _partly: bool = field(default=False, init=False)  # whether a tensor was sent in part
    _largest: int = field(default=0, init=False)  # entries of a tensor, so far
    _is_told: bool = field(default=False, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_names": {}}  # these are of the parameters of this process

    def settings(self) -> tuple[dict[str, str], str | None]:
        """The settings, which must be equal on all ranks; and what is wrong with them, or None."""
        values = {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        error = _wrong_density("density", self.density)
        if self.total_density is not None:
            error = error or _wrong_density("total_density", self.total_density)
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
        """The names of a bucket's parameters: dtype, and number from the model's last one back.

        In the first backward the buckets of DistributedDataParallel come from the last parameters
        to the first; in each bucket the parameters are in the model's order. Numbering them from
        the end of each bucket gives numbers that do not depend on where the buckets are cut.
        """
        for parameter in reversed(parameters):
            known = self._names.get(id(parameter))
            if known is None or known[0]() is not parameter:
                kind = str(parameter.dtype).removeprefix("torch.")
                number = sum(name.startswith(f"{kind} ") for _, name in self._names.values()) + 1
                self._names[id(parameter)] = weakref.ref(parameter), f"{kind} -{number}"
        return [self._names[id(parameter)][1] for parameter in parameters]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What is kept, by kind and name of the tensor: see `weft.ddp.TopK.state_dict`."""
        kept = self._kept.items()
        return {
            "residual": {n: each.residual for n, each in kept if each.residual is not None},
            "velocity": {n: each.velocity for n, each in kept if each.velocity is not None},
            "steps": {n: each.steps for n, each in kept},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from what `state_dict` returned, and copy it.

        Raises:
            WeftError: it is something else.
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
        residual, velocity = (
            {name: each.clone() for name, each in state[kind].items()}
            for kind in ("residual", "velocity")
        )
        self._kept = {
            name: _Kept(residual.get(name), velocity.get(name), steps)
            for name, steps in state["steps"].items()
        }

    @torch.no_grad()
    def reduce(
        self,
        group: Group,
        tensors: Mapping[str, Tensor],
        algorithm: str,
        density: float | None = None,
        error: str | None = None,
        description: str | None = None,
    ) -> Record | None:
        """Replace tensors by the mean of what the ranks send. Collective; runs on the worker.

        Args:
            group: of the ranks that take part.
            tensors: by name; 1-D, contiguous, of one dtype, on one device.
            algorithm: of `weft.sparse_all_reduce`.
            density: used in place of the setting.
            error: what is wrong with this rank's call, or None; raised on every rank.
            description: of tensors, which ranks compare; None: that of these tensors.

        Returns:
            The record of the sparse call.

        Raises:
            WeftError: as `sync_sparsified`.
        """
        asked = self.density if density is None else density
        error = error or _wrong_density("density", asked) or self._wrong_algorithm(algorithm)
        parts: dict[str, Tensor] = {}
        if error is None:
            parts = {name: flat for name, flat in tensors.items() if flat.numel()}
        step = self._step_of(parts, asked)
        with self._as_it_was_if_it_raises(parts):
            self._pick_all(step, density)
            if step.trouble is not None:
                error = in_words(step.trouble)
            # takes place even if no tensor is sparsified: it compares the ranks
            request = Request.of(step.rows, "avg", algorithm, self.wire_dtype, None)
            request.error = error or request.error
            compared = {"tensors": description or _described(tensors), "density": str(density)}
            if self.total_density is not None:
                # it falls with the steps, which may have been loaded
                most = summed_up(str(step.most), _SPELLED, f"{sum(step.most)}")
                compared["entries of the result"] = most
            request.fields = compared | request.fields
            total = self._share_sparse(group, step, request)
            reduce_dense(group, step.copies, "avg", self.wire_dtype)
            self._take_means(step, total)
        return last_call(group)

    def _step_of(self, parts: dict[str, Tensor], density: float) -> _Step:
        """A step of these tensors, of which nothing is picked."""
        step = _Step(parts)
        for name, flat in parts.items():
            if self._is_sparsified(flat, density):
                step.sparse.append(name)
                step.starts.append(step.starts[-1] + flat.numel())
                step.most.append(self._most(name, flat.numel()))
                self._partly = True
            else:
                step.whole.append(name)
            self._largest = max(self._largest, flat.numel())
        return step

    def _pick_all(self, step: _Step, density: float | None) -> None:
        """Add each tensor to what is kept of it, and pick what is sent.

        An error becomes the step's trouble: raised here, it would leave the other ranks waiting.
        """
        try:
            for name in step.sparse:
                step.picked[name] = self._picked(name, step.parts[name], density)
            for name in step.whole:
                step.picked[name] = self._picked(name, step.parts[name], density, whole=True)
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
            self._kept[name].sent(*step.picked[name], shared)
            step.parts[name].zero_().index_copy_(0, where, total.values[mine])
        for name, mean in zip(step.whole, step.copies, strict=True):
            self._kept[name].sent(*step.picked[name])
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
                if kept.is_under_way:
                    kept.undone(parts[name], self.momentum)
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

    def wrong(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with what is kept of these tensors, or None: it may have been loaded."""
        for name, tensor in tensors.items():
            kept = self._kept.get(name) or _Kept()
            for each in (kept.residual, kept.velocity):
                if each is not None and each.shape != (tensor.numel(),):
                    return (
                        f"{each.numel()} numbers are kept of tensor {name!r}, which has "
                        f"{tensor.numel()}: "
                        "have a state for each model, and load what this rank saved of it"
                    )
        return None

    def _picked(
        self, name: str, flat: Tensor, density: float | None, *, whole: bool = False
    ) -> _Picked:
        """Add a step's tensor to what is kept of it, and select what is sent."""
        kept = self._kept.setdefault(name, _Kept())
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
        total = kept.added(flat, self.momentum)
        where = None if whole else entries_to_send(total, share, self.chunk)
        values = total if where is None else total[where]
        return where, values, narrowed(values, sends).to(flat.dtype)

    def _most(self, name: str, numel: int) -> int:
        """How many entries of a tensor the result has at most in this step."""
        if self.total_density is None:
            return numel
        kept = self._kept.get(name) or _Kept()
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


def _rows_of(picked: Sequence[_Picked], starts: Sequence[int], like: Tensor) -> Rows:
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


def entries_to_send(values: Tensor, density: float, chunk: int | None) -> Tensor:
    """The places of the entries of a 1-D tensor that are sent, ascending; none of them is zero.

    Args:
        values: the tensor.
        density: the fraction of entries, rounded up to whole ones.
        chunk: None, or the number of entries of a chunk; the fraction is then of each chunk.

    Example:
        >>> entries_to_send(torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.5]), 0.3, None)
        tensor([1, 2])
        >>> entries_to_send(torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.5]), 0.3, 3)
        tensor([1, 5])
    """
    # NaN counts as infinity: it is sent, so that every rank sees it
    size = values.abs().nan_to_num_(math.inf, math.inf)
    if chunk is None or chunk >= len(size):
        return largest_entries(size, math.ceil(density * len(size)))
    rows = torch.nn.functional.pad(size, (0, -len(size) % chunk)).view(-1, chunk)
    best = rows.topk(math.ceil(density * chunk), 1, sorted=False).indices
    starts = torch.arange(0, rows.numel(), chunk, device=size.device)
    where: Tensor = (best + starts[:, None]).flatten().sort().values
    return where[rows.view(-1)[where] > 0]


def largest_entries(size: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of numbers that are not negative, ascending, without zeros.

    Of equal numbers the first are taken, so the result does not depend on torch's `topk`.
    """
    for limit in (*(_estimate(size, aim * count) for aim in AIMS), 0.0):
        where = (size >= limit if limit else size > 0).nonzero().view(-1)
        if len(where) >= count or not limit:
            break
    if len(where) <= count:
        return where
    among = size[where]
    least = among.topk(count, sorted=False).values.amin()
    taken = among > least
    equal = (among == least).nonzero().view(-1)
    taken[equal[: count - int(taken.sum())]] = True
    return where[taken]


def _estimate(size: Tensor, count: float) -> float:
    """A threshold that about `count` of the numbers reach, estimated from a sample of them."""
    total = len(size)
    most = min(total, math.ceil(_SAMPLED * total / count))
    sample = size
    if 4 * most < total:
        # a golden-ratio step spreads the sample, whatever the rows and columns of the tensor are
        step = int(total * _GOLDEN)
        while math.gcd(step, total) > 1:
            step += 1
        sample = size[torch.arange(most, device=size.device) * step % total]
    most = len(sample)
    above = sample.topk(min(most, math.ceil(most * count / total)), sorted=False).values
    return float(above.amin())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_density(name: str, density: Any) -> str | None:
    if _is_number(density) and 0 < density <= 1:
        return None
    return f"{name} is {shown(density)}: pass the share of entries to send, above 0, at most 1"
