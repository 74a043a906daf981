"""Embedding tables that are cut by rows over the ranks of a group, so that each holds a P-th.

Rank r holds the rows from `r * ceil(V / P)` on, `ceil(V / P)` of them or what is left: the cut of
`torch.chunk`, which is also that of a DTensor with `Shard(0)`, so a checkpoint of
torch.distributed's takes the shards as they are.

A lookup asks the owner of each row for it once: ranks exchange the indices that they want, then the
rows, for any number of tables at once. Backward sends the gradients of these rows back by the same
lists, so no index travels again, and their owner adds them in rank order: the gradient of its shard
is a sparse tensor with each row once, for an optimizer that knows of no ranks. All arithmetic on
rows that have come is torch's own.

Row-wise sharding as in Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training
of Deep Learning Recommendation Models" (ISCA'22), section 4.2.3; no row is on two ranks.

`weft.nn` has the public names. They are made here since what serves them lies above `weft.nn`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from . import kernels
from .agree import summed_up
from .comm.all_to_all import Scatter
from .comm.differentiable import applied
from .comm.named import Cut
from .comm.staging import unsendable
from .errors import WeftError, entry
from .kernels.ops import OPS
from .nn.mesh import as_shard
from .wire import default
from .wire.base import Wire

_NAME = "sharded_lookup"
_SPELLED = 500  # characters of a fingerprint that tell what tables there are; above, a digest

M = TypeVar("M", bound=nn.Module)


_Asked = tuple[Tensor, Callable[[Tensor], Tensor]]
"""What a rank wants of one table: indices of rows, sorted, each once; and what makes its output of
these rows."""


class ShardedTable(Cut):
    """What `ShardedEmbedding` and `ShardedEmbeddingBag` have in common.

    Attributes:
        weight: the rows of this rank, `[rows, embedding_dim]`.
        first: the number of the first of them.
    """

    _kind: Any  # of torch's
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        sparse: bool = True,
        device: Any = None,
        average: bool = True,
        group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options |= {"sparse": sparse, "device": "meta"}
        self._cut(self._kind(num_embeddings, embedding_dim, *args, **options), average, group)
        rows = torch.empty_like(self.weight, device=device or torch.get_default_device())
        self.weight = nn.Parameter(rows, self.weight.requires_grad)
        self.reset_parameters()

    def _cut(self, table: Any, average: bool, group: Any) -> None:
        """Become this rank's part of a table of torch's."""
        vars(self).update({name: getattr(table, name) for name in table.__constants__})
        self.average, self._group = average, group
        wire, total = self._wire(), self.num_embeddings
        height = -(-total // wire.size)
        self._bounds = [min(rank * height, total) for rank in range(wire.size + 1)]
        self._rank = wire.rank
        self.first, end = self._bounds[wire.rank : wire.rank + 2]
        whole = table.weight
        self.weight = nn.Parameter(whole.detach()[self.first : end].clone(), whole.requires_grad)
        self._ddp_params_and_buffers_to_ignore = ["weight"]
        hooked: Any = self  # torch has no types here
        hooked.register_state_dict_post_hook(_with_shard)
        hooked.register_load_state_dict_pre_hook(_with_rows)

    @classmethod
    def _of(cls, table: nn.Module, average: bool, group: Any) -> Self:
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(table, average, group)
        return made.train(table.training)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        *,
        sparse: bool = True,
        average: bool = True,
        group: Any = None,
        **options: Any,
    ) -> Self:
        """A table with given rows, of which each rank copies its own; nothing is sent.

        Args:
            embeddings: the whole table `[num_embeddings, embedding_dim]`, the same on every rank;
                of one that is mapped from a file (`torch.from_file`) no more than that is read.
            freeze: the weight requires no gradient.
            sparse, average, group: as for the class.
            options: others of the class, by name.
        """
        table = cls._kind.from_pretrained(embeddings, freeze, sparse=sparse, **options)
        return cls._of(table, average, group)

    def _wire(self) -> Wire:
        return default.resolve(self._group)

    def __setattr__(self, name: str, value: Any) -> None:
        # being there at all, it makes fully_shard call register_parameter
        if name == "weight" and not isinstance(value, nn.Parameter):
            raise self._cut_twice()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:  # FullyShardedDataParallel's, parametrizations'
        if name == "weight":
            raise self._cut_twice()
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; raises WeftError for a DTensor, as of fully_shard and distribute_module."""
        if hasattr(param, "to_local"):
            raise self._cut_twice()
        super().register_parameter(name, param)

    def _cut_twice(self) -> WeftError:
        return WeftError(
            f"the weight of {self} is this rank's rows, which nothing else may cut, replace or "
            "compute: pass ignored_params={table.weight} to fully_shard, ignored_states="
            "[table.weight] to FullyShardedDataParallel, and leave the table out elsewhere"
        )

    def reset_parameters(self) -> None:
        """Draw the weight anew, as torch's tables do: from the normal distribution, padding zero.

        Each rank draws from a generator of its own, seeded by a number of torch's default generator
        and by the rank: ranks of one seed have different rows. What is drawn depends on how many
        ranks there are.
        """
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self._rank
        with torch.no_grad():
            if not self.weight.is_meta:
                self.weight.normal_(generator=torch.Generator(self.weight.device).manual_seed(seed))
            own = -1 if self.padding_idx is None else self.padding_idx - self.first
            if 0 <= own < len(self.weight):
                self.weight[own].zero_()

    def as_dtensor(self, rows: Tensor | None = None) -> Tensor:
        """This rank's rows of something that has a row for each of the table, as a DTensor.

        For checkpoints of what an optimizer keeps of the weight, such as Adagrad's `sum`. It shares
        its memory, so `torch.distributed.checkpoint.load` fills it in place. Nothing is sent.

        Args:
            rows: `[rows of this rank, ...]`; None: the weight.

        Returns:
            A DTensor `[num_embeddings, ...]` placed `Shard(0)` over the group; the rows themselves
            where torch.distributed has no such group, as in a program of threads.
        """
        own = self.weight if rows is None else rows
        return as_shard(own.detach(), self.num_embeddings, self._wire())

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """The whole table `[num_embeddings, embedding_dim]`, on every rank; collective.

        Raises:
            WireError: a peer or a link failed; names the culprit. The group is lost.
        """
        wire = self._wire()
        scatter = Scatter(wire, "to_dense", fields={"tables": _described([self])})
        return torch.cat(applied(scatter, [self.weight.detach()] * wire.size))

    def _distinct(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct indices that a caller gave, sorted, and where each of them is in those.

        Raises:
            WeftError: they are none of this table's, or its weight is not this rank's rows.
        """
        for name, each in (("the weight", self.weight), ("the input", given)):
            if error := unsendable(name, each):
                raise WeftError(error)
        shape = tuple(self.weight.shape)
        rows = self._bounds[self._rank + 1] - self.first, self.embedding_dim
        if shape != rows:
            raise WeftError(f"the weight has shape {shape}: it must have {rows}, this rank's rows")
        if given.dtype not in (torch.int32, torch.int64):
            raise WeftError(f"the input is {given.dtype}: indices must be int32 or int64")
        if given.device != self.weight.device:
            where = self.weight.device
            raise WeftError(f"the input is on {given.device}, the table on {where}: move one")
        found, order, starts, _ = kernels.distinct(given.reshape(-1))
        if count := found.numel():
            low, high = kernels.read(torch.stack([found[0], found[count - 1]]).long())
            wrong, total = low if low < 0 else high, self.num_embeddings
            if not 0 <= wrong < total:
                raise WeftError(
                    f"index {wrong} is outside of a table of {total} rows: pass 0 to {total - 1}"
                )
        place = torch.arange(count, device=given.device, dtype=given.dtype)
        if starts is not None:
            place = place.repeat_interleave(starts.diff(), output_size=given.numel())
        if order is not None:
            place = torch.empty_like(place).scatter_(0, order, place)
        return found, place.view(given.shape)

    def _padding(self, indices: Tensor) -> int | None:
        """Where in sorted indices the padding is, if it is."""
        if self.padding_idx is None:
            return None
        own = indices.new_tensor([self.padding_idx, self.padding_idx + 1])
        begin, end = kernels.read(torch.searchsorted(indices, own))
        return begin if end > begin else None

    @property
    def _what(self) -> str:
        """What must be the same on all ranks."""
        kind = "averaged" if self.average else "summed"
        most = "" if self.max_norm is None else f", max_norm {self.max_norm} of {self.norm_type}"
        size = f"{self.num_embeddings} x {self.embedding_dim}"
        return f"{size} of {str(self.weight.dtype)[6:]}, gradients {kind}{most}"


class ShardedEmbedding(ShardedTable):
    """`torch.nn.Embedding`, whose rows are cut over the ranks of a group.

    All ranks call it together, each with its own indices, also with none; if the weight of some
    rank requires a gradient, all must run backward, through all outputs of a call or through none.
    Then `weight.grad` is the gradient of this rank's rows: what it is for a replicated table under
    DistributedDataParallel, for any optimizer that works row by row.

    Args:
        num_embeddings, embedding_dim: rows of the table, and numbers in each; over all ranks.
        padding_idx, max_norm, norm_type, scale_grad_by_freq: as for `torch.nn.Embedding`; a
            frequency is that in the input of one rank.
        sparse: the gradient of the weight is a sparse tensor, each row once: for `torch.optim.SGD`,
            `Adagrad` and `SparseAdam`. False: a dense one, for all others.
        device, dtype: of the weight.
        average: gradients are divided by the number of ranks, as DistributedDataParallel does;
            False: they are summed.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.

    Attributes:
        weight: the rows of this rank, `[rows, embedding_dim]`; drawn at random as torch's are,
            otherwise on each rank.
        first: the number of the first of them.

    Raises:
        WeftError: some rank's input is wrong, or tables differ; the same text on every rank, naming
            the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):  # 3 rows on the first of two ranks, 2 on the second
        ...     whole = torch.arange(10.0).view(5, 2)
        ...     table = weft.nn.ShardedEmbedding.from_pretrained(whole, freeze=False)
        ...     rows = table(torch.tensor([[4, 1, 4 - wire.rank]]))
        ...     rows.sum().backward()
        ...     return rows[0, :, 0].tolist(), table.weight.grad.to_dense()[:, 0].tolist()
        >>> run(2, program)
        [([8.0, 2.0, 8.0], [0.0, 1.0, 0.0]), ([8.0, 2.0, 6.0], [0.5, 1.5])]
    """

    _kind = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """The rows with these indices: `[*input.shape, embedding_dim]`; collective."""
        return sharded_lookup([self], [input])[0]

    def _asked(self, input: Tensor) -> _Asked:
        indices, place = self._distinct(input)
        padding, scales = self._padding(indices), self.scale_grad_by_freq

        def output(rows: Tensor) -> Tensor:
            return functional.embedding(place, _some(rows), padding, scale_grad_by_freq=scales)

        return indices, output

    extra_repr = nn.Embedding.extra_repr


class ShardedEmbeddingBag(ShardedTable):
    """`torch.nn.EmbeddingBag`, whose rows are cut over the ranks of a group.

    As `ShardedEmbedding`, in all that is not said here.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq: as there.
        mode: what becomes of the rows of a bag: "sum", "mean" or "max".
        sparse: as there; also for "max".
        include_last_offset, padding_idx: as for `torch.nn.EmbeddingBag`.
        device, dtype, average, group: as there.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     whole = torch.arange(10.0).view(5, 2)
        ...     bags = weft.nn.ShardedEmbeddingBag.from_pretrained(whole, mode="sum")
        ...     return bags(torch.tensor([0, 4, 1]), torch.tensor([0, 2])).tolist()
        >>> run(2, program)[0]
        [[8.0, 10.0], [2.0, 3.0]]
    """

    _kind = nn.EmbeddingBag
    mode: str
    include_last_offset: bool

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row for each bag, `[bags, embedding_dim]`; collective.

        Args:
            input: int32 or int64: `[bags, n]`, or 1-D with offsets.
            offsets: where each bag begins, and with `include_last_offset` where the last one ends.
            per_sample_weights: of the shape of the input, for the mode "sum"; differentiable.
        """
        return sharded_lookup([self], [(input, offsets, per_sample_weights)])[0]

    def _asked(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> _Asked:
        indices, place = self._distinct(input)
        padding = self._padding(indices)

        def output(rows: Tensor, weights: Tensor | None = per_sample_weights) -> Tensor:
            return functional.embedding_bag(
                place,
                _some(rows),
                offsets,
                scale_grad_by_freq=self.scale_grad_by_freq,
                mode=self.mode,
                per_sample_weights=weights,
                include_last_offset=self.include_last_offset,
                padding_idx=padding,
            )

        try:  # with rows of one number: what torch refuses must be known before ranks meet
            weights = None if per_sample_weights is None else per_sample_weights.detach()
            output(self.weight.new_zeros(max(1, len(indices)), 1), weights)
        except Exception as error:
            raise WeftError(f"{type(error).__name__}: {error}") from error
        return indices, output

    extra_repr = nn.EmbeddingBag.extra_repr


def _some(rows: Tensor) -> Tensor:
    """Rows of which there is at least one, as torch wants a table to have.

    So all ranks record the same operations, in which `torch.utils.checkpoint` finds where to stop.
    """
    return rows if len(rows) else torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


_KINDS: dict[type, type[ShardedTable]] = {
    nn.Embedding: ShardedEmbedding,
    nn.EmbeddingBag: ShardedEmbeddingBag,
}


@entry
def sharded_lookup(
    tables: Sequence[ShardedTable], inputs: Sequence[Tensor | tuple[Any, ...]]
) -> list[Tensor]:
    """The outputs of several sharded tables, for the messages of one; differentiable, collective.

    Args:
        tables: of one group, dtype and device, the same on every rank; one may be there twice.
        inputs: for each what it is called with: a tensor, or a tuple of arguments.

    Returns:
        What each would have returned. A rank that uses some of them only still gets, and gives,
        the gradients of all.

    Raises:
        WeftError, WireError: as the tables do.

    Example:
        >>> import torch, weft
        >>> asked = [torch.tensor([3]), torch.tensor([7])]
        >>> with weft.init():
        ...     users, films = (weft.nn.ShardedEmbedding(rows, 4) for rows in (10, 20))
        ...     rows = weft.nn.sharded_lookup([users, films], asked)
        >>> [each.shape for each in rows]
        [torch.Size([1, 4]), torch.Size([1, 4])]
    """
    if not tables or (others := [each for each in tables if not isinstance(each, ShardedTable)]):
        what = f"has a {type(others[0]).__name__}" if tables else "is empty"
        raise WeftError(f"tables {what}: pass a list of weft.nn.ShardedEmbedding(Bag)")
    wire = tables[0]._wire()
    error: str | None = None
    asked: list[_Asked] = []
    try:
        _check(tables, inputs, wire)
        for table, given in zip(tables, inputs, strict=True):
            one: Any = table
            asked.append(one._asked(*(given if isinstance(given, tuple) else (given,))))
    except Exception as wrong:  # such as the TypeError of a call with an argument too many
        name = f"table {len(asked)}: " if len(tables) > 1 else ""
        error = f"{name}{wrong if isinstance(wrong, WeftError) else repr(wrong)}"
    with record_function("weft::sharded_lookup"):
        rows = _fetched(wire, tables, [indices for indices, _ in asked], error)
    return [output(found) for (_, output), found in zip(asked, rows, strict=True)]


def _check(tables: Sequence[ShardedTable], inputs: Sequence[object], wire: Wire) -> None:
    """Raises WeftError where tables cannot be asked together, or not by this rank."""
    if len(inputs) != len(tables):
        raise WeftError(f"{len(inputs)} inputs for {len(tables)} tables: pass one for each")
    kinds = dict.fromkeys(f"{each.weight.dtype} on {each.weight.device}" for each in tables)
    if len(kinds) > 1:
        raise WeftError(f"there are tables of {' and '.join(kinds)}: ask those of one kind at once")
    for each in tables:
        made = each._rank, len(each._bounds) - 1
        if each._wire() is not wire or made != (wire.rank, wire.size):
            raise WeftError(f"a table of rank {made[0]} of {made[1]} is asked in another group")


def _described(tables: Sequence[ShardedTable]) -> str:
    """What tables are, for the fingerprint of a call."""
    text = "; ".join(table._what for table in tables)
    return summed_up(text, _SPELLED, f"{len(tables)} tables, the first {tables[0]._what}")


def _fetched(
    wire: Wire, tables: Sequence[ShardedTable], wanted: Sequence[Tensor], error: str | None
) -> list[Tensor]:
    """The rows of each table that this rank wants, `[u, embedding_dim]`; collective.

    Two exchanges: who wants what, and the rows. A message holds the parts of all tables, one behind
    the other.
    """
    fields: dict[str, object] = {"tables": _described(tables)}
    messages, counts = [torch.empty(0, dtype=torch.int64)] * wire.size, [[0]]
    if error is None:
        messages, counts = _questions(wire, tables, wanted)
    scatter = Scatter(wire, f"{_NAME} (indices)", error, fields=fields)
    heard = applied(scatter, messages)
    # a table's rows that a rank wants, by rank and table
    given = kernels.read(torch.cat([each[: len(tables)] for each in heard]).long())
    runs = []
    for rank, message in enumerate(heard):
        sizes = given[rank * len(tables) : (rank + 1) * len(tables)]
        runs.append(list(torch.split(message[len(tables) :], sizes)))
    parts = _Owned.apply(tables, runs, *(table.weight for table in tables))  # type: ignore[no-untyped-call]  # torch's
    came = applied(Scatter(wire, f"{_NAME} (rows)", fields=fields), cast(list[Tensor], parts))
    dims = [table.embedding_dim for table in tables]
    pieces = [
        torch.split(each, [count * dim for count, dim in zip(some, dims, strict=True)])
        for each, some in zip(came, counts, strict=True)
    ]
    return [
        torch.cat([each[number] for each in pieces]).view(len(indices), dim)
        for number, (indices, dim) in enumerate(zip(wanted, dims, strict=True))
    ]


def _questions(
    wire: Wire, tables: Sequence[ShardedTable], wanted: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[int]]]:
    """For each rank how many rows of each table are wanted of it, and which, as it counts them; and
    those numbers again, for the host."""
    device = tables[0].weight.device
    ends = [
        torch.searchsorted(indices, indices.new_tensor(table._bounds))
        for table, indices in zip(tables, wanted, strict=True)
    ]
    width, flat = wire.size + 1, kernels.read(torch.cat(ends))
    cuts = [flat[at : at + width] for at in range(0, len(flat), width)]
    counts = [[each[rank + 1] - each[rank] for each in cuts] for rank in range(wire.size)]
    tall = max(table.num_embeddings for table in tables) >= 1 << 31
    dtype = torch.int64 if tall else torch.int32
    heads = torch.tensor(counts, dtype=dtype, device=device)
    messages = []
    for rank in range(wire.size):
        own = (
            (indices[each[rank] : each[rank + 1]] - table._bounds[rank]).to(dtype)
            for table, indices, each in zip(tables, wanted, cuts, strict=True)
        )
        messages.append(torch.cat([heads[rank], *own]))
    return messages, counts


class _Owned(torch.autograd.Function):
    """What each rank asked for of the rows that are here; its adjoint adds up what comes back."""

    @staticmethod
    def forward(
        ctx: Any,
        tables: Sequence[ShardedTable],
        runs: list[list[Tensor]],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tables, ctx.runs = tables, runs
        for number, table in enumerate(tables):
            if table.max_norm is not None:
                asked = torch.cat([some[number] for some in runs])
                own = weights[number].detach()
                torch.embedding_renorm_(own, asked, table.max_norm, table.norm_type)
        parts = []
        for some in runs:
            places = zip(weights, some, strict=True)
            rows = [weight.index_select(0, asked).view(-1) for weight, asked in places]
            parts.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        dims = [table.embedding_dim for table in ctx.tables]
        pieces = [
            torch.split(each, [len(asked) * dim for asked, dim in zip(some, dims, strict=True)])
            for each, some in zip(gradients, ctx.runs, strict=True)
        ]
        found: list[Tensor | None] = []
        for number, table in enumerate(ctx.tables):
            rows = [
                (some[number], each[number].view(len(some[number]), dims[number]))
                for some, each in zip(ctx.runs, pieces, strict=True)
            ]
            found.append(_gradient(table, rows) if ctx.needs_input_grad[2 + number] else None)
        return None, None, *found


def _gradient(table: ShardedTable, runs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of a table's rows that are here, of what all ranks sent, in rank order."""
    indices, sums = kernels.merge(runs, OPS["sum"])
    values = torch.empty_like(sums, dtype=table.weight.dtype)
    kernels.finish(sums, values, len(runs) if table.average else 1)
    flags: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
    shape = table.weight.shape
    gradient = torch.sparse_coo_tensor(indices.long()[None], values, shape, **flags)
    return gradient if table.sparse else gradient.to_dense()


def shard_embeddings(
    module: M, min_rows: int = 100_000, *, average: bool = True, group: Any = None
) -> M:
    """Cut the large tables of a model over the ranks; nothing is sent.

    To be called on the whole model, the same on every rank, before an optimizer is made and before
    DistributedDataParallel or FSDP2 takes it. It replaces each `torch.nn.Embedding` and
    `EmbeddingBag` of at least so many rows, no subclasses, by a sharded one with the same rows and
    arguments (`sparse`, too: False means dense gradients of the shard). It also marks all sharded
    tables of the model, those that were there already, as none of DistributedDataParallel's.

    Args:
        module: the model.
        min_rows: smaller tables stay as they are.
        average, group: as for `ShardedEmbedding`.

    Returns:
        The model itself; a new module where the model is such a table.

    Raises:
        WeftError: the weight of such a table is another parameter, too.

    Example:
        >>> import torch, weft
        >>> with weft.init():
        ...     model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 1))
        ...     weft.nn.shard_embeddings(model, min_rows=1000)
        Sequential(
          (0): ShardedEmbedding(1000, 8)
          (1): Linear(in_features=8, out_features=1, bias=True)
        )
    """
    names: dict[int, list[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    places: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part) in _KINDS and cast(Any, part).num_embeddings >= min_rows:
            places.setdefault(part, []).append(name)
    for part, found in places.items():
        tied = names[id(part.weight)]
        if len(tied) > len(found):
            raise WeftError(
                f"{tied[0]!r} and {tied[-1]!r} are one parameter, which cannot be cut in one place "
                f"only: untie them, or pass min_rows above {part.num_embeddings}"
            )
    for part, found in places.items():
        made = _KINDS[type(part)]._of(part, average, group)
        for name in found:
            if not name:
                return cast(M, made)
            above, _, last = name.rpartition(".")
            setattr(module.get_submodule(above), last, made)
    others = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ignored = dict.fromkeys([*others, *_weights(module)])
    module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]  # DDP's
    return module


def _weights(module: nn.Module) -> list[str]:
    """The names of the shards in a module."""
    parts = module.named_modules()
    return [f"{name}.weight".lstrip(".") for name, part in parts if isinstance(part, ShardedTable)]


def _guard(parent: nn.Module, _: str, module: nn.Module | None) -> None:
    """Raises where DistributedDataParallel would give all ranks the shards of rank 0.

    torch calls it when a module becomes a part of another, which is before
    DistributedDataParallel sends anything.
    """
    if isinstance(parent, DistributedDataParallel) and module is not None:
        marked = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for name in _weights(module):
            if name not in marked:
                raise WeftError(
                    f"DistributedDataParallel would overwrite the shard {name!r} by that of rank "
                    "0: call weft.nn.shard_embeddings on the model that it is given, before"
                )


register_module_module_registration_hook(_guard)


def _with_shard(module: ShardedTable, state: dict[str, Any], prefix: str, _: object) -> None:
    """The state of a table has its weight as a DTensor."""
    if isinstance(state.get(f"{prefix}weight"), Tensor):
        state[f"{prefix}weight"] = module.as_dtensor()


def _with_rows(module: ShardedTable, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Of a DTensor, or of a whole table, the rows of this rank are loaded."""
    given: Any = state.get(f"{prefix}weight")
    if hasattr(given, "to_local"):
        state[f"{prefix}weight"] = given.to_local()
    elif given is not None and len(given) == module.num_embeddings:
        state[f"{prefix}weight"] = given[module.first :][: len(module.weight)]
