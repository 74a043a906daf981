"""Embedding tables that are cut by rows over the ranks of a group: each rank holds a P-th.

P is the number of ranks and V the number of rows. Rank r holds the rows from `r * ceil(V / P)` up
to, not including, `(r + 1) * ceil(V / P)`, as far as the table has them; the last ranks may hold
fewer rows or none. `torch.chunk` and a DTensor with `Shard(0)` cut in the same way, so
torch.distributed.checkpoint saves and loads the shards as DTensors.

A lookup takes two exchanges, whatever the number of tables. In the first, each rank sends to the
owner of each row that it needs the index of that row, once. In the second, the owners send the
rows. Backward takes one exchange: it sends the gradients of the rows back to their owners, in the
order of the index lists of forward, so it sends no indices. The owner adds what the ranks sent, in
rank order. The gradient of a shard is a sparse tensor that has each row once (or a dense one: see
`sparse`), so an optimizer treats the shard as it treats any parameter. torch itself computes the
output from the rows that a rank received (`functional.embedding`, `functional.embedding_bag`).

Source: row-wise parallelism in Mudigere et al., "Software-Hardware Co-design for Fast and Scalable
Training of Deep Learning Recommendation Models" (ISCA'22). There the owners add up the rows of each
bag that they hold and send these partial sums (a reduce-scatter); here they send the rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ...base._torch import profiled
from ...base.arguments import in_words
from ...base.errors import WeftError, check, entry
from ...call.attempt import preparing
from ...comm.all_to_all import Scatter
from ...comm.differentiable import apply
from ...comm.named import shards_by_name
from ...comm.staging import unsendable
from ...group import default
from ...group.group import Group
from ...verbs.group import read
from ..mesh import as_shard
from ..partition import Partition
from .lookup import ASKING, NAME, Search, Table, description_of, fetched, messages_for

M = TypeVar("M", bound=nn.Module)


_Asked = tuple[Tensor, Callable[[Tensor, Tensor, int | None], Tensor]]
"""The indices that a caller gave for a table; and the function that computes the table's output
from the rows of the distinct ones, the place among these of each given one, and that of
`padding_idx`."""


class ShardedTable(Table):
    """The common base of `ShardedEmbedding` and `ShardedEmbeddingBag`.

    Attributes:
        weight: the rows of this rank, `[rows of this rank, embedding_dim]`.
        first: the index, in the whole table, of this rank's first row; `num_embeddings` on a rank
            without rows.
        bounds: for each rank the index of its first row; and `num_embeddings`.
    """

    _kind: Any  # the class of torch that this one stands for
    scale_grad_by_freq: bool
    first: int
    _ranks: Partition  # which copies of the table share, and pickle finds again by name
    _rank: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Also what `copy` and `pickle` begin with: from here on tables are guarded."""
        made = super().__new__(cls)
        _guard_models()
        return made

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        sparse: bool = True,
        device: Any = None,
        average: bool = True,
        group: object = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options |= {"sparse": sparse, "device": "meta"}
        self._cut(self._kind(num_embeddings, embedding_dim, *args, **options), average, group)
        rows = torch.empty_like(self.weight, device=device or torch.get_default_device())
        self.weight = nn.Parameter(rows, self.weight.requires_grad)
        self.reset_parameters()
        self._take_number()

    def _cut(self, table: Any, average: bool, handle: object) -> None:
        """Take the settings of a table of torch's, and copy this rank's rows of it."""
        vars(self).update({name: getattr(table, name) for name in table.__constants__})
        group = default.resolve(handle)
        self.average = average
        self._ranks = Partition(group.size, group=handle)
        total = self.num_embeddings
        height = -(-total // group.size)
        self.bounds = [min(rank * height, total) for rank in range(group.size + 1)]
        self._rank = group.rank
        self.first, end = self.bounds[group.rank : group.rank + 2]
        whole = table.weight
        self.weight = nn.Parameter(whole.detach()[self.first : end].clone(), whole.requires_grad)
        self._ddp_params_and_buffers_to_ignore = _marks(["weight"])
        hooked: Any = self  # torch has no types here
        hooked.register_state_dict_post_hook(_with_shard)
        hooked.register_load_state_dict_pre_hook(_with_rows)

    @classmethod
    def _of(cls, table: nn.Module, average: bool, group: object) -> Self:
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        vars(made).update(_attributes(table))
        made._cut(table, average, group)
        vars(made.weight).update(vars(table.weight))
        made._take_number()
        return made.train(table.training)

    def _take_number(self) -> None:
        """The last thing in making a table: one that could not be made has none."""
        self._number = next(_numbers.setdefault(self._group(), itertools.count()))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        *,
        sparse: bool = True,
        average: bool = True,
        group: object = None,
        **options: Any,
    ) -> Self:
        """Make a table of given rows: each rank copies its own rows of them. No row is sent.

        Args:
            embeddings: the whole table, `[num_embeddings, embedding_dim]`, the same on every rank.
                Each rank reads its own rows only, so the tensor may be mapped from a file that is
                larger than memory (`torch.from_file`).
            freeze: whether the weight requires no gradient.
            sparse, average, group: as for the class.
            options: other arguments of the class, by name, but for `device` and `dtype`: the
                weight has those of `embeddings`.

        Raises:
            AssertionError, ValueError, TypeError: from torch, where its class refuses an argument.
            WeftError: there is no such group; raised on this rank alone.

        Example:
            >>> import torch, weft
            >>> with weft.init():
            ...     whole = torch.arange(6.0).view(3, 2)
            ...     weft.nn.ShardedEmbedding.from_pretrained(whole)(torch.tensor([2, 0]))
            tensor([[4., 5.],
                    [0., 1.]])
        """
        table = cls._kind.from_pretrained(embeddings, freeze, sparse=sparse, **options)
        return cls._of(table, average, group)

    def _group(self) -> Group:
        return self._ranks.group

    def __setattr__(self, name: str, value: Any) -> None:
        # a module with a __setattr__ of its own makes fully_shard call register_parameter
        if name == "weight" and not isinstance(value, nn.Parameter):
            raise self._cut_twice()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:  # FullyShardedDataParallel's, parametrizations'
        if name == "weight":
            raise self._cut_twice()
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's, but raises WeftError for a DTensor, which would cut the rows again.

        fully_shard and distribute_module register the DTensors that they make by this method.
        """
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
        """Draw the weight again from the standard normal distribution; set the padding row to zero.

        torch's tables do the same. Each rank takes one number from torch's default generator on the
        CPU and adds its rank to it: this seeds the generator from which it draws its rows. So ranks
        with equal seeds draw different rows, and a table over another number of ranks has other
        rows. A weight on the meta device stays as it is.
        """
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self._rank
        with torch.no_grad():
            if not self.weight.is_meta:
                self.weight.normal_(generator=torch.Generator(self.weight.device).manual_seed(seed))
            own = -1 if self.padding_idx is None else self.padding_idx - self.first
            if 0 <= own < len(self.weight):
                self.weight[own].zero_()

    def as_dtensor(self, rows: Tensor | None = None) -> Tensor:
        """Return this rank's rows of a tensor with a row for each row of the table, as a DTensor.

        It serves checkpoints of an optimizer's state, such as Adagrad's `sum`. The DTensor shares
        the memory of `rows`, so `torch.distributed.checkpoint.load` fills `rows` in place. Nothing
        is sent.

        Args:
            rows: `[rows of this rank, ...]`, any dtype, on the device of the weight; None: the
                weight.

        Returns:
            A DTensor `[num_embeddings, ...]` with the placement `Shard(0)` over the group. Where
            torch.distributed has no such group (ranks that are threads, a program that runs
            alone), `rows` itself, detached.

        Raises:
            WeftError: the DTensor would have other rows than this rank's; raised on this rank
                alone.

        Example:
            >>> import torch, weft
            >>> with weft.init():  # alone: torch.distributed has no group
            ...     table = weft.nn.ShardedEmbedding(5, 2)
            ...     table.as_dtensor(torch.zeros(5)).shape
            torch.Size([5])
        """
        group = self._group()
        own = self._own_rows(group, rows).detach()
        process_group = group.process_group()
        if process_group is None:
            return own
        return as_shard(own, self.num_embeddings, process_group)

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """Return the whole table, `[num_embeddings, embedding_dim]`, on every rank. Collective.

        The result is a new tensor, with the dtype and device of the weight; not differentiable.

        Raises:
            WeftError: the tables of the ranks differ, or the weight of some rank is not its rows;
                the same text on every rank, naming a rank. The next call works.
            WireError: a peer or a link failed; names the culprit. The group is lost.

        Example:
            >>> import torch, weft
            >>> from weft.testing import run
            >>> def program(group):
            ...     whole = torch.arange(5).view(5, 1)
            ...     table = weft.nn.ShardedEmbedding.from_pretrained(whole.double())
            ...     return table.first, len(table.weight), table.to_dense().flatten().tolist()
            >>> run(2, program)
            [(0, 3, [0.0, 1.0, 2.0, 3.0, 4.0]), (3, 2, [0.0, 1.0, 2.0, 3.0, 4.0])]
        """
        group = self._group()
        with preparing(group, "to_dense"):
            own = self._checked_weight(group).detach()
            scatter = Scatter(group, "to_dense", {"tables": description_of([self])})
        return torch.cat(apply(scatter, [own] * group.size))

    def _checked_weight(self, group: Group) -> Tensor:
        """The weight, to be sent as the rows that this rank has in a group.

        Raises:
            WeftError: it is not there, cannot be sent, or is not these rows.
        """
        weight = self._own_rows(group)
        check(unsendable("the weight", weight))
        return weight

    def _own_rows(self, group: Group, given: Tensor | None = None) -> Tensor:
        """The weight, or another tensor that is given, with a row for each row of this rank.

        Raises:
            WeftError: the weight is gone, as torch.nn.utils.weight_norm takes it off, or the tensor
                is not of these rows: anybody may set the weight; or the table comes from another
                rank, by way of a file.
        """
        rows = self._parameters.get("weight") if given is None else given
        if rows is None:
            raise WeftError(
                f"{self} has no weight, which something took off it: set its weight to a "
                "torch.nn.Parameter of this rank's rows, and let nothing else compute it"
            )
        size = len(self.bounds) - 1
        if (self._rank, size) != (group.rank, group.size):
            raise WeftError(
                f"the table is that of rank {self._rank} of {size}, and not of rank {group.rank} "
                f"of {group.size}: make one here, and load its rows from a checkpoint"
            )
        name = "the weight" if given is None else "the tensor"
        width = (self.embedding_dim,) if given is None else rows.shape[1:]
        shape = (self.bounds[self._rank + 1] - self.first, *width)
        if rows.shape != shape:
            has = tuple(rows.shape)
            raise WeftError(f"{name} has shape {has}: it must have {shape}, this rank's rows")
        return rows

    def search(self, given: Tensor) -> Search:
        """Sort the indices that a caller gave, and find where those of each rank begin and,
        behind these, where `padding_idx` is.

        Raises:
            WeftError: the input cannot be sent, or is none of indices.
        """
        check(unsendable("the input", given))
        if given.dtype not in (torch.int32, torch.int64):
            raise WeftError(f"the input is {given.dtype}: indices must be int32 or int64")
        if given.device != self.weight.device:
            both = f"the input is on {given.device}, the table on {self.weight.device}"
            raise WeftError(f"{both}: move one")
        if self.num_embeddings > torch.iinfo(given.dtype).max:  # the bounds of ranks need more
            given = given.long()
        padding = -1 if self.padding_idx is None else self.padding_idx  # of which there is none
        return Search.of(given, [*self.bounds, padding, padding + 1])

    def cuts_in(self, numbers: Sequence[int]) -> tuple[Sequence[int], int | None]:
        """Where in what `search` found the rows of each rank begin, and the last rank's end; and
        the place of `padding_idx`, if it is there.

        Args:
            numbers: of that search, as the host has read them.

        Raises:
            WeftError: an index is not of this table.
        """
        *others, begin, end = numbers
        cuts = others[-len(self.bounds) :]
        total = self.num_embeddings
        for index in others[: -len(cuts)]:
            if not 0 <= index < total:
                raise WeftError(
                    f"index {index} is outside of a table of {total} rows: pass 0 to {total - 1}"
                )
        return cuts, begin if end > begin else None


class ShardedEmbedding(ShardedTable):
    """`torch.nn.Embedding` whose rows are cut over the ranks of a group.

    All ranks call it together, each with its own indices; a rank may have none. If the weight
    requires a gradient, every rank must run backward through the output, or none may.

    After backward, `weight.grad` has the rows of this rank of the gradient that a whole copy of the
    table on every rank would have under DistributedDataParallel (`average=True`). So an optimizer
    that updates each row from the gradient of that row alone gives the same weights.

    Make the tables of a group on every rank, in one order: by that ranks know which one is meant.

    Args:
        num_embeddings, embedding_dim: the rows of the whole table, and the numbers in a row.
        padding_idx, max_norm, norm_type, scale_grad_by_freq: as for `torch.nn.Embedding`. The
            frequency of an index is counted in the input of one rank. With `max_norm`, each owner
            renormalises, in forward and in place, the rows that some rank asked for.
        sparse: True (the default): the gradient of the weight is a sparse COO tensor that has each
            row once, as `torch.optim.SGD`, `Adagrad` and `SparseAdam` take it. False: it is dense,
            as the other optimizers need it.
        device, dtype: of the weight, by default torch's default ones.
        average: True (the default): the sum of the ranks' gradients is divided by the number of
            ranks, as DistributedDataParallel does. False: it is not.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Attributes:
        weight: the rows of this rank, `[rows of this rank, embedding_dim]`, drawn from the standard
            normal distribution (`reset_parameters`).
        first: the index, in the whole table, of this rank's first row.

    Raises:
        WeftError: from a call, `to_dense` and backward: the input of some rank is wrong, or the
            ranks' tables differ; the same text on every rank, naming a rank. The next call works.
            From the constructor: there is no such group; raised on this rank alone.
        WireError: a peer or a link failed; names the culprit. The group is lost.
        AssertionError, TypeError: from the constructor, by torch, which refuses an argument.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):  # 3 rows on the first of two ranks, 2 on the second
        ...     whole = torch.arange(10.0).view(5, 2)
        ...     table = weft.nn.ShardedEmbedding.from_pretrained(whole, freeze=False)
        ...     rows = table(torch.tensor([[4, 1, 4 - group.rank]]))
        ...     rows.sum().backward()
        ...     return rows[0, :, 0].tolist(), table.weight.grad.to_dense()[:, 0].tolist()
        >>> run(2, program)
        [([8.0, 2.0, 8.0], [0.0, 1.0, 0.0]), ([8.0, 2.0, 6.0], [0.5, 1.5])]
    """

    _kind = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows with these indices. Collective, differentiable.

        Args:
            input: indices in the whole table, int32 or int64, of any shape, on the weight's device.

        Returns:
            `[*input.shape, embedding_dim]`, with the dtype and on the device of the weight.
        """
        return sharded_lookup([self], [input])[0]

    def _asked(self, input: Tensor) -> _Asked:
        def output(rows: Tensor, place: Tensor, padding: int | None) -> Tensor:
            scales = self.scale_grad_by_freq
            return functional.embedding(place, _some(rows), padding, scale_grad_by_freq=scales)

        return input, output

    extra_repr = nn.Embedding.extra_repr


class ShardedEmbeddingBag(ShardedTable):
    """`torch.nn.EmbeddingBag` whose rows are cut over the ranks of a group.

    What is not said here is as for `ShardedEmbedding`, its errors included.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq: as there.
        mode: how the rows of a bag become one: "sum", "mean" (the default) or "max".
        sparse: as there. Unlike torch's, it also serves the mode "max".
        include_last_offset, padding_idx: as for `torch.nn.EmbeddingBag`.
        device, dtype, average, group: as there.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
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
        """Return one row for each bag. Collective, differentiable.

        Args:
            input: indices in the whole table, int32 or int64, on the device of the weight:
                `[bags, n]`, or 1-D with `offsets`.
            offsets: for a 1-D input, the place in it where each bag begins, `[bags]`; with
                `include_last_offset` also the place where the last bag ends, `[bags + 1]`.
            per_sample_weights: factors of the rows, with the shape of `input` and the dtype of the
                weight, for the mode "sum" only; differentiable.

        Returns:
            `[bags, embedding_dim]`, with the dtype and on the device of the weight.
        """
        return sharded_lookup([self], [(input, offsets, per_sample_weights)])[0]

    def _asked(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> _Asked:
        def output(rows: Tensor, place: Tensor, padding: int | None) -> Tensor:
            return functional.embedding_bag(
                place,
                _some(rows),
                offsets,
                scale_grad_by_freq=self.scale_grad_by_freq,
                mode=self.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
                padding_idx=padding,
            )

        return input, output

    extra_repr = nn.EmbeddingBag.extra_repr


def _some(rows: Tensor) -> Tensor:
    """These rows, or one row of zeros if there are none: torch refuses a table without rows.

    So a rank without input records the same operations as the others. `torch.utils.checkpoint`
    counts them to find where recomputation may stop.
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
    """Call several sharded tables at once, with the messages of one call. Collective.

    The outputs are differentiable. Each backward pass through one or more of them is one collective
    call for all tables, so every rank must run as many passes. Which outputs a rank's loss uses may
    differ between ranks: the rank sends gradients of zero for the others. A table whose output no
    rank's loss uses gets no gradient.

    Args:
        tables: sharded tables of one group, one dtype and one device, the same on every rank. A
            table may be in the list twice.
        inputs: for each table the argument of its call: a tensor, or a tuple of arguments.

    Returns:
        For each table the output of its call.

    Raises:
        WeftError: as for the tables; or the tables do not fit together, or are not as many as the
            inputs. An error about a list that is empty, or that has something else than a sharded
            table, is raised on this rank alone.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> asked = [torch.tensor([3]), torch.tensor([7])]
        >>> with weft.init():
        ...     users, films = (weft.nn.ShardedEmbedding(rows, 4) for rows in (10, 20))
        ...     rows = weft.nn.sharded_lookup([users, films], asked)
        >>> [each.shape for each in rows]
        [torch.Size([1, 4]), torch.Size([1, 4])]
    """
    remedy = "pass a list of weft.nn.ShardedEmbedding(Bag)"
    if not tables:
        raise WeftError(f"tables is empty: {remedy}")
    for each in tables:
        if not isinstance(each, ShardedTable):
            raise WeftError(f"tables has a {type(each).__name__}: {remedy}")
    group = tables[0]._group()
    line = group.line
    with profiled(NAME):
        with preparing(line, ASKING):
            if len(inputs) != len(tables):
                raise WeftError(f"{len(inputs)} inputs for {len(tables)} tables: pass one for each")
            if any(each._group() is not group for each in tables):
                raise WeftError(
                    "the tables are cut over several groups: ask those of one group at once"
                )
            wanted, counts, outputs = _asked_of(line, tables, inputs)
            messages = messages_for(tables, wanted, counts)
        rows = fetched(line, tables, counts, messages)
    return [output(found) for output, found in zip(outputs, rows, strict=True)]


def _asked_of(
    group: Group, tables: Sequence[ShardedTable], inputs: Sequence[object]
) -> tuple[list[Tensor], list[list[int]], list[Callable[[Tensor], Tensor]]]:
    """The indices of the rows that a caller wants of each table, ascending; how many of them are
    on each rank; and what computes its output of these rows. The host waits for a device once.

    Raises:
        WeftError: something is wrong with it; of several tables it says with which.
    """
    asked: list[tuple[ShardedTable, Search, Callable[..., Tensor]]] = []
    kinds: dict[str, None] = {}  # of weights
    for number, (table, given) in enumerate(zip(tables, inputs, strict=True)):
        arguments = given if isinstance(given, tuple) else (given,)
        kind: Any = table
        with _about_table(number, tables):
            weight = table._checked_weight(group)
            kinds.setdefault(f"{weight.dtype} on {weight.device}")
            indices, output = kind._asked(*arguments)
            asked.append((table, table.search(indices), output))
    if len(kinds) > 1:
        raise WeftError(f"there are tables of {' and '.join(kinds)}: ask those of one kind at once")
    numbers = iter(read(group, torch.cat([search.numbers for _, search, _ in asked])))
    wanted = []
    counts = []
    outputs: list[Callable[[Tensor], Tensor]] = []
    for number, (table, search, output) in enumerate(asked):
        with _about_table(number, tables):
            cuts, padding = table.cuts_in([*itertools.islice(numbers, len(search.numbers))])
            compute = functools.partial(output, place=search.place, padding=padding)
            if isinstance(table, ShardedEmbeddingBag):
                # of one number a row: what torch refuses must be known before ranks exchange any
                with torch.no_grad():
                    compute(table.weight.new_zeros(cuts[-1], 1))
        wanted.append(search.found[: cuts[-1]])
        counts.append([end - start for start, end in itertools.pairwise(cuts)])
        outputs.append(compute)
    return wanted, counts, outputs


@contextlib.contextmanager
def _about_table(number: int, tables: Sequence[ShardedTable]) -> Iterator[None]:
    """A block about one of some tables: of several, what it raises says which."""
    try:
        yield
    except Exception as wrong:  # such as the TypeError of a call with an argument too many
        said = str(wrong) if isinstance(wrong, WeftError) else in_words(wrong)
        place = f"table {number}: " if len(tables) > 1 else ""
        raise WeftError(place + said) from wrong


def shard_embeddings(
    module: M, min_rows: int = 100_000, *, average: bool = True, group: object = None
) -> M:
    """Replace the large embedding tables of a model by sharded ones. No row is sent.

    Call it on the whole model, with the same weights on every rank. Call it before you make an
    optimizer, and before DistributedDataParallel or FSDP2 wraps the model. It replaces each
    `torch.nn.Embedding` and `torch.nn.EmbeddingBag`, but no subclass of them, that has `min_rows`
    rows or more. The sharded table has the same rows and arguments, `sparse` included: with
    `sparse=False` the gradient of the shard is dense. It also has the attributes that somebody set
    on the table, or on its weight. The call also lists all shards of the model,
    those of tables that it already had included, under all their names, among the parameters that
    DistributedDataParallel ignores.

    Args:
        module: the model.
        min_rows: tables of fewer rows stay as they are.
        average, group: as for `ShardedEmbedding`.

    Returns:
        The model itself; or, if the model is such a table, a new module.

    Raises:
        WeftError: the weight of such a table is also another parameter of the model (tied weights);
            the table or its weight has hooks, buffers, a gradient, or a method of its own, such as
            `forward`; or there is no such group; raised on this rank alone. The model is as it was.

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
        if what := _more_than_rows(part):
            raise WeftError(
                f"{found[0] or 'the module'!r} has {what}, which the table that takes its place "
                "would not have: remove that before, and put it on that table, afterwards"
            )
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
    ignored = dict.fromkeys([*others, *_marks(shards_by_name(module))])
    module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]  # DDP's
    return module


def _more_than_rows(part: nn.Module) -> str | None:
    """What a table of torch's has that cannot go along to the one in its place, or None."""
    weight: Any = part._parameters.get("weight")
    if weight is None or len(part._parameters) > 1:
        return "other parameters than a weight"
    for name, register in vars(nn.Module()).items():  # of hooks, of buffers, of parts
        if isinstance(register, Sized) and name != "_parameters" and vars(part).get(name):
            return f"its own {name}"
    needed = {*Table.__annotations__, *ShardedTable.__annotations__}
    for name in _attributes(part):
        # it would take the place of what the other one needs, such as its forward
        if hasattr(_KINDS[type(part)], name) or name in needed:
            return f"its own {name}"
    if weight.grad is not None:
        return "a gradient, weight.grad"
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(weight, name):
            return f"hooks of its weight, {name}"
    return None


def _attributes(part: nn.Module) -> dict[str, Any]:
    """The attributes of a table of torch's that its class does not give it."""
    given: Any = part
    usual = {*vars(nn.Module()), *given.__constants__}
    return {name: value for name, value in vars(part).items() if name not in usual}


def _marks(names: Iterable[str]) -> list[str]:
    """Names of parameters, for DistributedDataParallel: in a model, and once that is compiled.

    Where it lists what to reduce, the names of the model's own parameters begin with a dot.
    """
    found = []
    for name in names:
        found += [name, f"_orig_mod.{name}"]
        if "." not in name:
            found.append(f".{name}")
    return found


def _guard(parent: nn.Module, _: str, module: nn.Module | None) -> None:
    """Raise WeftError where DistributedDataParallel would overwrite all shards by rank 0's.

    torch calls it when a module becomes a part of another. DistributedDataParallel takes a model as
    its part before it sends anything.
    """
    if isinstance(parent, DistributedDataParallel) and module is not None:
        marked = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        shards = shards_by_name(module)
        for name, shard in shards.items():
            if name not in marked:
                others = [each for each in shards if shards[each] is shard and each != name]
                tied = f", which is {others[0]!r}, too," if others else ""
                raise WeftError(
                    f"DistributedDataParallel would overwrite the shard {name!r}{tied} by that of "
                    "rank 0: call weft.nn.shard_embeddings on the model that it is given, before "
                    "that, and after weights are tied"
                )


_numbers: weakref.WeakKeyDictionary[Group, Iterator[int]] = weakref.WeakKeyDictionary()
"""The number of the next table that is made, by the group whose ranks it is cut over."""


@functools.cache  # once in a process
def _guard_models() -> None:
    """Have torch call `_guard` from now on."""
    register_module_module_registration_hook(_guard)


def _with_shard(module: ShardedTable, state: dict[str, Any], prefix: str, _: object) -> None:
    put_shard(module, state, f"{prefix}weight")


def _with_rows(module: ShardedTable, state: dict[str, Any], prefix: str, *_: object) -> None:
    take_rows(module, state, f"{prefix}weight")


def put_shard(table: ShardedTable, state: dict[str, Any], key: str) -> None:
    """Put the weight of a table, which a state dict has under a key, there as a DTensor."""
    if isinstance(state.get(key), Tensor):
        state[key] = table.as_dtensor()


def take_rows(table: ShardedTable, state: dict[str, Any], key: str) -> None:
    """Leave this rank's rows of what a state dict has under a key."""
    if key in state:
        state[key] = own_rows(table, state[key])


def own_rows(table: ShardedTable, given: Any) -> Any:
    """This rank's rows of what a state has of a table: a DTensor's, or a copy of a whole one's.

    A view would keep the memory of the whole table, which whoever assigns it would hold and save.
    """
    if hasattr(given, "to_local"):
        return given.to_local()
    if isinstance(given, Tensor) and given.shape[:1] == (table.num_embeddings,):
        return given[table.first :][: len(table.weight)].clone()
    return given
