"""Gradients of which a share is sent: `weft.ddp.TopK`, `topk_hook` and `weft.sync_sparsified`."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import io
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.base.errors import WeftError, WireError
from weft.ddp import TopK, sparsify, topk_hook
from weft.ddp import largest as largest_of
from weft.ddp.largest import entries_to_send, largest_entries
from weft.group.group import Group
from weft.testing import run, spmd

OPTIONS: tuple[dict[str, Any], ...] = (
    {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
)


def test_that_everything_is_sent_whole_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with weft.init():
        for density, numel in ((0.5, 100), (1.0, 100), (0.5, 9000)):
            state = TopK(density)
            for _ in range(2):
                weft.sync_sparsified([torch.ones(numel), torch.ones(3)], state)
        model = DistributedDataParallel(nn.Linear(9, 9))
        model.register_comm_hook(TopK(0.1), topk_hook)
        for _ in range(2):
            model(torch.ones(1, 9)).sum().backward()
    assert [record.message.partition(", and")[0] for record in caplog.records] == [
        "TopK sends everything whole: the largest tensor has 100 entries",
        "TopK sends everything whole: the largest tensor has 81 entries",
    ]


def everywhere(group: Group, tensor: Tensor) -> list[Tensor]:
    """A tensor of each rank."""
    return list(weft.all_to_all([tensor] * group.size, group=group))


def drawn(group: Group, step: int, *shape: int) -> Tensor:
    """Numbers of this rank, a few of them large."""
    generator = torch.Generator().manual_seed(100 * step + group.rank)
    return torch.randn(shape, generator=generator) ** 3


def trained(body: Callable[..., None]) -> Callable[..., None]:
    """In a process group of these processes, which DistributedDataParallel wants, and weft over it.

    The group outlives the models: one that goes with its model waits for a thread that may wait for
    this one (torch's destructor keeps the interpreter).
    """

    @functools.wraps(body)
    def inside(group: Group, tmp_path: Path, **given: Any) -> None:
        meeting = f"file://{tmp_path}/meeting"
        dist.init_process_group("gloo", meeting, rank=group.rank, world_size=group.size)
        try:
            with weft.init(timeout=60):
                body(group, tmp_path, **given)
        finally:
            dist.destroy_process_group()

    return inside


def model_of(sparse: bool = False) -> nn.Module:
    torch.manual_seed(5)
    table = nn.EmbeddingBag(40, 20, sparse=sparse, mode="sum")
    return nn.Sequential(table, nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))


def wrapped(model: nn.Module, state: TopK | None, **options: Any) -> DistributedDataParallel:
    made = DistributedDataParallel(copy.deepcopy(model), **options)
    if state is not None:
        made.register_comm_hook(state, topk_hook)
    return made


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    out: Tensor = model(torch.randint(0, 40, (6, 3), generator=generator))
    return out.pow(2).mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.to_dense().clone() for each in model.parameters()]


def losses(model: nn.Module, steps: range) -> list[float]:
    """Of some steps of plain SGD."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda size: size,
    "rows": lambda size: size * (torch.arange(300)[:, None] % 7 == 3),
    "zeros": torch.zeros_like,
    "ties": lambda size: (3 * size).round(),
    "few": lambda size: size.where(torch.arange(300)[:, None] < 2, 0),
    "bad": lambda size: size.where(size < 3, math.inf),
}


# also with limits that let too few through
@pytest.mark.parametrize("aims", [largest_of.AIMS, (0.1, 0.5)])
@pytest.mark.parametrize("count", [1, 7, 300, 30_000])
@pytest.mark.parametrize("kind", NUMBERS)
def test_the_largest_are_found(
    kind: str, count: int, aims: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a sample misleads: in rows of one scale each, with ties, with mostly zeros."""
    monkeypatch.setattr(largest_of, "AIMS", aims)
    size = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)).abs()
    size = NUMBERS[kind](size).flatten()
    order = size.sort(descending=True, stable=True).indices[:count]  # of equal numbers the first
    assert torch.equal(largest_entries(size, count), order[size[order] > 0].sort().values)


def test_chunks_have_equal_shares() -> None:
    values = torch.randn(1000) * torch.arange(1000)
    best = values.abs().view(10, 100).topk(10).indices + torch.arange(0, 1000, 100)[:, None]
    assert torch.equal(entries_to_send(values, 0.1, 100), best.flatten().sort().values)
    assert len(entries_to_send(torch.ones(250), 0.01, 100)) == 3  # the last chunk is shorter


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"chunk": 100}, {"error_feedback": False}])
@spmd(1, 3, on=("threads",))
def test_what_is_not_sent_is_kept(
    group: Group, settings: dict[str, Any], wire_dtype: torch.dtype | None
) -> None:
    """The means of all steps, and that of what is left: together the mean of all that was given."""
    state = TopK(0.05, min_numel=100, wire_dtype=wire_dtype, group=group, **settings)
    shapes = {"wide": (40, 50), "narrow": (99,), "last": (7, 70)}
    given, got = ({n: torch.zeros(shape) for n, shape in shapes.items()} for _ in "ab")
    for step in range(5):
        tensors = {name: drawn(group, step, *shape) for name, shape in shapes.items()}
        for name, each in tensors.items():
            given[name] += each
        weft.sync_sparsified(tensors, state)
        for name, each in tensors.items():
            got[name] += each
            assert all(torch.equal(each, other) for other in everywhere(group, each))
        assert 0 < tensors["wide"].count_nonzero() <= 100 * group.size
    residual, feedback = state.state_dict()["residual"], settings.get("error_feedback", True)
    assert ("wide" in residual) == feedback
    assert ("narrow" in residual) == (feedback and wire_dtype is not None)
    for name, shape in shapes.items() if feedback else ():
        left = residual.get(name, torch.zeros(math.prod(shape))).view(shape)
        wanted = sum(everywhere(group, given[name] - left)) / group.size
        # a mean of several ranks is rounded once more, which is not kept
        off = (
            0.0 if wire_dtype is None or group.size == 1 else 2.0**-8 * 5 * drawn(group, 0, 9).max()
        )
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-4 + 40 * off)


@spmd(4, on=("threads", "device", "processes"))
def test_the_largest_of_each_rank_are_averaged(group: Group) -> None:
    tensors = [drawn(group, 1, 1000), drawn(group, 2, 30, 30).t(), drawn(group, 3, 64).bfloat16()]
    before = [each.clone() for each in tensors]
    weft.sync_sparsified(tensors, TopK(0.02, min_numel=50, group=group))
    for found, own in zip(tensors, before, strict=True):
        flat = own.contiguous().flatten()
        where = flat.float().abs().topk(math.ceil(0.02 * len(flat))).indices
        mine = torch.zeros(len(flat)).index_copy_(0, where, flat[where].float())
        wanted = (sum(everywhere(group, mine)) / group.size).to(own.dtype)
        torch.testing.assert_close(found.contiguous().flatten(), wanted)
    given = [torch.ones(100)]
    weft.sync_sparsified(given, TopK(0.02, min_numel=50, group=group), density=0.5)
    assert given[0].count_nonzero() == 50


@spmd(2, on=("threads",))
def test_numbers_that_are_none_are_sent_and_not_kept(group: Group) -> None:
    """However many: the next step is as if they had not been."""
    state = TopK(0.01, min_numel=1, momentum=0.5, group=group)
    bad = torch.ones(1000)
    bad[100:400] = math.nan if group.rank else 1
    weft.sync_sparsified([bad], state)
    assert not bad.isfinite().all()
    later = drawn(group, 1, 1000)
    weft.sync_sparsified([later], state)
    assert later.isfinite().all() and later.any()
    assert all(each.isfinite().all() for each in state.state_dict()["residual"].values())
    small = torch.tensor([1.0, math.nan])  # sent whole, with a velocity
    weft.sync_sparsified([small], TopK(momentum=0.5, group=group))
    assert small[0] == 1 and small[1].isnan()
    zeros, nothing = TopK(0.01, min_numel=1, group=group), torch.zeros(1000)
    weft.sync_sparsified([nothing], zeros)
    assert not nothing.any() and zeros.calls[-1].rows == 0


def largest(values: Tensor, count: int) -> Tensor:
    """Where the largest magnitudes are, of equal ones the first; ascending."""
    order = values.abs().sort(descending=True, stable=True).indices[:count]
    return order.sort().values


def whole_numbers(group: Group, step: int, *shape: int) -> Tensor:
    """Gradients whose means are exact in float32, with many of the same magnitude."""
    generator = torch.Generator().manual_seed(100 * step + group.rank)
    return torch.randint(-6, 7, shape, generator=generator).float() * group.size


SHAPES = {"wide": (40, 50), "small": (9,), "long": (700,)}


@spmd(1, 2, 3, 7, on=("threads",))
def test_the_largest_means_are_shared_and_nothing_is_lost(group: Group) -> None:
    the_largest_means_are_shared_and_nothing_is_lost(group, "all")


@pytest.mark.parametrize("rows_on", ["first", "none"])
@spmd(4, on=("threads",))
def test_the_largest_means_are_shared_of_ranks_without_any(group: Group, rows_on: str) -> None:
    the_largest_means_are_shared_and_nothing_is_lost(group, rows_on)


def the_largest_means_are_shared_and_nothing_is_lost(group: Group, rows_on: str) -> None:
    """Against a selection of all that ranks sent, made here; exactly, since numbers are whole."""
    state = TopK(0.05, total_density=0.04, min_numel=100, group=group)
    given, got = ({n: torch.zeros(shape) for n, shape in SHAPES.items()} for _ in "ab")
    residuals = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        silent = rows_on == "none" or (rows_on == "first" and group.rank > 0)
        tensors = {name: whole_numbers(group, step, *SHAPES[name]) for name in SHAPES}
        for name, each in tensors.items():
            if silent:
                each.zero_()
            given[name] += each
            residuals[name] += each
        weft.sync_sparsified(tensors, state)
        for name, each in tensors.items():
            got[name] += each
            assert all(torch.equal(each, other) for other in everywhere(group, each))
            if name == "small":  # which is sent whole
                residuals[name].zero_()
                continue
            flat = residuals[name].flatten()
            where = largest(flat, math.ceil(0.05 * len(flat)))
            where = where[flat[where] != 0]
            sent = torch.zeros_like(flat).index_copy_(0, where, flat[where])
            mean = sum(everywhere(group, sent)) / group.size
            has = sum(everywhere(group, (sent != 0).float())) > 0
            # a mean of zero is shared, too, if entries of others that cancel out were sent
            order = torch.where(has, mean.abs(), -1.0).sort(descending=True, stable=True).indices
            shared = order[: math.ceil(0.04 * len(flat))]
            shared = shared[has[shared]]
            wanted = torch.zeros_like(flat).index_copy_(0, shared, mean[shared])
            assert torch.equal(each.flatten(), wanted)
            mine = shared[sent[shared] != 0]
            residuals[name].view(-1)[mine] = 0
    kept = state.state_dict()["residual"]
    for name in SHAPES:
        left = kept[name].view(SHAPES[name]) if name in kept else torch.zeros(SHAPES[name])
        assert torch.equal(left, residuals[name])
        total = sum(everywhere(group, given[name]))
        assert torch.equal(group.size * got[name] + sum(everywhere(group, left)), total)


@pytest.mark.parametrize("place", [0, 5000, 9900])
@spmd(4, on=("threads",))
def test_the_largest_may_all_be_one_owners_or_all_equal(group: Group, place: int) -> None:
    tensor = whole_numbers(group, 0, 10_000)
    tensor[place : place + 100] = 1000.0 + torch.arange(100)
    equal = torch.ones(10_000)
    weft.sync_sparsified([tensor, equal], TopK(0.5, total_density=0.01, group=group))
    assert torch.equal(tensor.nonzero().flatten(), torch.arange(place, place + 100))
    assert torch.equal(tensor[place : place + 100], 1000.0 + torch.arange(100))
    assert torch.equal(equal.nonzero().flatten(), torch.arange(100))  # of equal ones the first


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@spmd(3, on=("threads", "device", "processes"))
def test_means_of_any_dtype_are_selected(
    group: Group, dtype: torch.dtype, wire_dtype: torch.dtype | None
) -> None:
    tensor = drawn(group, 1, 3000).to(dtype)
    own = tensor.double().clone()
    where = largest(own, 300)
    settings = {"wire_dtype": wire_dtype, "min_numel": 1, "group": group}
    plain = tensor.clone()
    weft.sync_sparsified([plain], TopK(0.1, **settings))
    state = TopK(0.1, total_density=0.02, **settings)
    weft.sync_sparsified([tensor], state)
    found = tensor.nonzero().flatten()
    assert torch.equal(found, largest(plain.double(), 60))  # of the means that all would share
    assert torch.equal(tensor[found], plain[found])
    left = state.state_dict()["residual"]["0"].double()
    sent = torch.isin(where, found)
    off = 0.0 if wire_dtype is None else 2.0**-8
    assert (left[where[sent]].abs() <= off * own[where[sent]].abs()).all()
    assert torch.equal(left[where[~sent]], own[where[~sent]])


def test_a_rank_sends_fewer_than_six_words_an_entry() -> None:
    """On 24 ranks, whose independent entries would be 21 % of the tensor; two openings apart."""

    def program(group: Group) -> list[int]:
        sent = []
        for count in (2000, 4000):
            state = TopK(0.01, total_density=0.01, min_numel=1, group=group)
            tensor = drawn(group, 1, 100 * count)
            weft.sync_sparsified([torch.zeros(100 * count)], state)  # settings are compared
            before = group.traffic.bytes
            weft.sync_sparsified([tensor], state)
            assert tensor.count_nonzero() == count
            sent.append(group.traffic.bytes - before)
        return sent

    sent = zip(*run(24, program), strict=True)
    few, many = (sum(of_ranks) / 24 for of_ranks in sent)
    each = (many - few) / 2000  # bytes of each entry more
    assert 3 * 4 < each < 4.2 * 4
    fixed = few - 2000 * each  # openings, counts and digits, whatever the number of entries is
    assert fixed < 13_500
    assert few < 6 * 4 * 2000  # so also of 2,000 entries less than six words


@pytest.mark.parametrize(("count", "length"), [(2200, 40), (140, 4_700_000)])
@spmd(2, on=("threads",))
def test_counts_of_many_tensors_go_in_several_exchanges(
    group: Group, count: int, length: int
) -> None:
    """More tensors than are selected together, by digits of 4 bits and, beside a long one, of 8.

    The digits depend on how many entries may be shared. The long one has few that are not zero, so
    all of these are.
    """
    long = torch.zeros(length)
    long[:20] = whole_numbers(group, count, 20)
    many = [whole_numbers(group, number, 40) for number in range(count)]
    tensors = [many[0], long, *many[1:]]
    wanted = [each.clone() for each in tensors]
    weft.sync_sparsified(tensors, TopK(0.9, total_density=0.5, min_numel=1, group=group))
    weft.sync_sparsified(wanted, TopK(0.9, min_numel=1, group=group))
    assert torch.equal(long, wanted.pop(1))
    for found, mean in zip(many, wanted, strict=True):
        shared = largest(mean, 20)
        assert torch.equal(found, torch.zeros(40).index_copy_(0, shared, mean[shared]))


@spmd(3, on=("threads",))
def test_more_numbers_that_are_none_than_are_shared(group: Group) -> None:
    """The result is full of them, and the next step has none."""
    bad = torch.ones(1000)
    bad[200:300] = math.nan if group.rank == 1 else 1.0
    state = TopK(0.2, total_density=0.05, min_numel=1, momentum=0.5, group=group)
    weft.sync_sparsified([bad], state)
    assert bad.isnan().sum() == 50
    assert all(each.isfinite().all() for each in state.state_dict()["residual"].values())
    assert all(each.isfinite().all() for each in state.state_dict()["velocity"].values())
    later = drawn(group, 1, 1000)
    weft.sync_sparsified([later], state)
    assert later.isfinite().all() and later.count_nonzero() == 50


@spmd(3, on=("threads",))
def test_the_total_density_is_compared_and_checked(group: Group) -> None:
    me = group.rank == 1
    settings: dict[str, dict[str, Any]] = {
        r"^rank 1: total_density is 0: pass the share": {"total_density": 0},
        r"^rank 1: total_density is 1.5: pass the share": {"total_density": 1.5},
        r"differ in total_density: .*rank 1 has 0.5": {"total_density": 0.5},
        r"differ in total_density: .*rank 1 has None": {"total_density": None},
    }
    for text, wrong in settings.items():
        given = {"total_density": 0.1, "min_numel": 1, "group": group}
        refused(group, text, [torch.ones(9)], TopK(0.2, **(given | (wrong if me else {}))))
    state = TopK(0.2, total_density=0.1, min_numel=1, group=group, warmup_steps=9)
    state.algorithm = "split" if me else "auto"
    refused(group, r"^rank 1: algorithm is 'split', and total_density", [torch.ones(9)], state)
    state.algorithm = "auto"
    weft.sync_sparsified([torch.ones(90)], state)
    kept = copy.deepcopy(state.state_dict())
    if me:  # as if it had joined
        kept["steps"]["0"] = 0
    state.load_state_dict(kept)
    refused(group, r"differ in entries of the result: .*rank 1 has \[", [torch.ones(90)], state)


@spmd(2, on=("threads",))
def test_momentum_and_warm_up_are_those_of_the_paper(group: Group) -> None:
    state = TopK(0.01, momentum=0.9, warmup_steps=4, min_numel=1, group=group)
    velocity, residual = torch.zeros(1000), torch.zeros(1000)
    for step, count in enumerate((250, 112, 50, 23, 10, 10)):
        tensor = drawn(group, step, 1000)
        velocity = 0.9 * velocity + tensor
        residual = residual + velocity
        where = residual.abs().topk(count).indices
        sent = torch.zeros(1000).index_copy_(0, where, residual[where])
        velocity[where] = residual[where] = 0
        weft.sync_sparsified([tensor], state)
        torch.testing.assert_close(tensor, sum(everywhere(group, sent)) / 2)


def distance(group: Group, density: float, feedback: bool = True) -> float:
    """How far from the best weights a training ends in which each rank pulls to its own."""
    wanted = drawn(group, 0, 400)
    best = torch.stack(everywhere(group, wanted)).mean(0)
    state = TopK(density, error_feedback=feedback, min_numel=1, group=group)
    weights = torch.zeros(400)
    for step in range(100):
        gradient = weights - wanted
        weft.sync_sparsified([gradient], state)
        weights -= 0.2 * (1 - step / 100) * gradient
    return float((weights - best).norm() / best.norm())


@spmd(4, on=("threads",))
def test_training_needs_what_was_not_sent(group: Group) -> None:
    """The largest entries of a rank stay large: without feedback it never sends the others."""
    assert distance(group, 1.0) < 1e-3
    assert distance(group, 0.1) < 0.05
    assert distance(group, 0.1, feedback=False) > 0.3


def refused(group: Group, text: str, *given: Any) -> None:
    """`sync_sparsified` raises the same on every rank, and changes nothing."""
    with pytest.raises(WeftError, match=text) as caught:
        weft.sync_sparsified(*given)
    said = torch.tensor([*str(caught.value).encode()], dtype=torch.uint8)
    assert all(torch.equal(said, other) for other in everywhere(group, said))


@spmd(3, on=("threads",))
def test_who_is_wrong_is_named_on_every_rank(group: Group) -> None:
    me, good = group.rank == 1, {"min_numel": 1, "group": group}
    settings: dict[str, dict[str, Any]] = {
        r"^rank 1: density is 0: pass the share": {"density": 0},
        r"differ in density: .*rank 1 has 0.5": {"density": 0.5},
        r"^rank 1: momentum is 1.0: pass": {"momentum": 1.0},
        r"^rank 1: momentum .* corrects": {"momentum": 0.5, "error_feedback": False},
        r"^rank 1: chunk is 0: pass a whole number, at least 1": {"chunk": 0},
        r"^rank 1: wire_dtype is torch.int8": {"wire_dtype": torch.int8},
    }
    for text, wrong in settings.items():
        refused(group, text, [torch.ones(9)], TopK(**(good | (wrong if me else {}))))
    state = TopK(0.2, momentum=0.5, **good)
    weft.sync_sparsified([drawn(group, 0, 9)], state)
    kept = copy.deepcopy(state.state_dict())
    for tensors, density, text in (
        ([torch.ones(8)], None, r"^rank 1: 9 numbers are kept of tensor '0', which has 8"),
        ([torch.ones(9)] * 2, None, r"^the ranks differ in tensors: [^;]*'1' [^;]*; pass[^;]*$"),
        ([torch.ones(3, 3)], None, r"differ in tensors: .*rank 1 has '0' float32 \(3, 3\); pass"),
        ({1: torch.ones(9), "1": torch.ones(9)}, None, r"^rank 1: two keys of tensors are '1'"),
        ([torch.ones(9, dtype=torch.int64)], None, r"^rank 1: tensor 0 is torch.int64"),
        ([torch.ones(9).to(torch.float8_e5m2)], None, r"^rank 1: tensor 0 is torch.float8"),
        ([torch.inference_mode()(torch.ones)(9)], None, r"^rank 1: tensor 0 is of inference mode"),
        (torch.ones(9), None, r"^rank 1: tensors is a Tensor: pass a list"),
        ([torch.ones(1).expand(9)], None, r"^rank 1: tensor 0 has elements that sha"),
        ([torch.ones(9)], 0.5, r"ranks differ in density"),
        ([torch.ones(9)], 2, r"^rank 1: density is 2"),
    ):
        usual = torch.arange(9.0)
        refused(group, text, *((tensors, state, density) if me else ([usual], state)))
        assert usual.tolist() == [*range(9)]
        for kind in ("residual", "velocity"):
            torch.testing.assert_close(state.state_dict()[kind], kept[kind], rtol=0, atol=1e-5)
    weft.sync_sparsified([torch.ones(9)], state)
    other, pair = TopK(**good), [torch.arange(9.0), torch.arange(9.0, dtype=torch.float64)]
    other.load_state_dict(
        {"residual": {"1": torch.ones(9 + me)}, "velocity": {}, "steps": {"1": 1}}
    )
    refused(group, r"^rank 1: 10 numbers are kept of tensor '1'", pair, other)
    assert [each.tolist() for each in pair] == [[*range(9)]] * 2
    one = {"residual": {"0": torch.ones(9)}, "velocity": {}, "steps": {"0": 1}}
    for wrong in ({"residual": 3}, {"velocity": {"0": 3}}, {"steps": {"0": "x"}}, {"steps": {}}):
        with pytest.raises(WeftError, match="takes what state_dict"):
            state.load_state_dict({**one, **wrong})
    for other in state, TopK(**good):  # not connected yet
        refused(group, r"^rank 1: state is a dict: pass a", [torch.ones(9)], {} if me else other)


MARKED = 77.0  # the first number of a tensor of which a rank cannot pick what it sends


def troubled_by_marks(works: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of numbers that has no memory for those that are marked."""

    def inside(values: Tensor, *given: Any) -> Tensor:
        if len(values) and values[0] == MARKED:
            raise MemoryError("no memory")
        return works(values, *given)

    return inside


@pytest.mark.parametrize("numel", [90, 9])  # of a tensor that is sent in part, and of a whole one
@pytest.mark.parametrize("total_density", [None, 0.1])
@spmd(1, 3, on=("threads",))
def test_trouble_of_one_rank_is_raised_on_all_and_nothing_is_lost(
    group: Group, total_density: float | None, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the residuals of some tensors were added to; also of tensors that are new."""
    for name in ("entries_to_send", "narrowed"):
        monkeypatch.setattr(sparsify, name, troubled_by_marks(getattr(sparsify, name)))
    more = {"total_density": total_density, "min_numel": 20, "group": group}
    state, like = (TopK(0.2, momentum=0.5, **more) for _ in "ab")
    for each in state, like:
        weft.sync_sparsified(
            {"first": whole_numbers(group, 0, 90), "whole": whole_numbers(group, 3, 7)}, each
        )
    given = {name: whole_numbers(group, n, 90) for n, name in enumerate(("first", "last"))}
    given["whole"] = whole_numbers(group, 4, 7)
    given["new"] = whole_numbers(group, 5, numel)
    wanted = {name: each.clone() for name, each in given.items()}
    if group.rank == group.size - 1:
        given["new"][0] = MARKED
    before = copy.deepcopy(state.state_dict())
    text = rf"^rank {group.size - 1}: MemoryError: no memory$"
    for _ in range(2):
        found = {name: each.clone() for name, each in given.items()}
        refused(group, text, found, state)
        assert all(torch.equal(each, given[name]) for name, each in found.items())
        after = state.state_dict()
        assert after["steps"] == before["steps"] == {"first": 1, "whole": 1}
        for kind in ("residual", "velocity"):
            torch.testing.assert_close(after[kind], before[kind], rtol=0, atol=1e-5)
    given["new"] = wanted["new"].clone()
    weft.sync_sparsified(given, state)
    weft.sync_sparsified(wanted, like)
    torch.testing.assert_close(given, wanted)


def test_a_reduce_scatter_of_another_rank_is_told_from_that_of_topk() -> None:
    """They open alike, but for the name of the call; the next step works."""

    def program(group: Group) -> str:
        state = TopK(0.5, total_density=0.1, min_numel=20, group=group)
        given = torch.randn(60_000)
        weft.sync_sparsified([given], state)
        with pytest.raises(weft.WeftError) as caught:
            if group.rank:
                ids = torch.arange(30_000, dtype=torch.int32)
                weft.sparse_reduce_scatter(weft.Rows(ids, torch.ones(30_000), 60_000), "avg")
            else:
                weft.sync_sparsified([given], state)
        weft.sync_sparsified([given], state)
        return str(caught.value)

    texts = run(2, program)
    assert texts[0] == texts[1]
    assert texts[0] == (
        "the ranks are in different calls: rank 0 has sync_sparsified (call 3), rank 1 has "
        "sparse_reduce_scatter (call 3); make the same calls in the same order on every rank"
    )


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["mean_of_largest", "reduce_dense"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_raised_can_be_repeated(
    ranks: int, step: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of it, whatever was raised: on a new group it counts once."""
    failing: set[int] = set()
    has_begun = threading.Barrier(ranks)  # no rank's first step sees the trouble of the second
    works = getattr(sparsify, step)

    def troubled(group: Group, *given: Any) -> Any:
        if group.rank in failing:
            raise kind("trouble")
        return works(group, *given)

    def tensors_of(group: Group, number: int) -> list[Tensor]:
        """Of step 0 or 1, which has two that are new; those of 9 numbers are sent whole."""
        sizes = [(90, 9), (90, 9, 90, 9)][number]
        return [whole_numbers(group, 4 * number + n, size) for n, size in enumerate(sizes)]

    def state_of(group: Group) -> TopK:
        return TopK(0.2, total_density=0.1, momentum=0.5, min_numel=20, group=group)

    def interrupted(group: Group) -> dict[str, Any]:
        state = state_of(group)
        weft.sync_sparsified(tensors_of(group, 0), state)
        before = copy.deepcopy(state.state_dict())
        given = tensors_of(group, 1)
        has_begun.wait(60)
        if group.rank == group.size - 1:
            failing.add(group.rank)
        with pytest.raises((kind, WireError), match="trouble"):  # of which the others learn
            weft.sync_sparsified(given, state)
        assert all(map(torch.equal, given, tensors_of(group, 1)))
        after = state.state_dict()
        assert after["steps"] == before["steps"]
        for kept in ("residual", "velocity"):
            torch.testing.assert_close(after[kept], before[kept], rtol=0, atol=1e-5)
        return after

    def repeated(group: Group, kept: list[dict[str, Any]]) -> None:
        state, like = state_of(group), state_of(group)
        state.load_state_dict(kept[group.rank])
        weft.sync_sparsified(tensors_of(group, 0), like)
        found, wanted = tensors_of(group, 1), tensors_of(group, 1)
        weft.sync_sparsified(found, state)
        weft.sync_sparsified(wanted, like)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(state.state_dict(), like.state_dict())

    monkeypatch.setattr(sparsify, step, troubled)
    kept = run(ranks, interrupted)
    failing.clear()
    run(ranks, repeated, kept)


def interrupt_at(point: int) -> Callable[..., Any]:
    """A tracer that raises at this one of the points in `error_feedback` where Ctrl-C may.

    That is behind a call: Python looks for signals there, and not behind an assignment.
    """
    behind: list[str] = []

    def tracer(frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith("error_feedback.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            behind.append(dis.opname[frame.f_code.co_code[frame.f_lasti]])
            if behind[:-1].count("CALL") == point and behind[-2] == "CALL":
                raise KeyboardInterrupt
        return tracer

    return tracer


@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_interrupted_step_leaves_what_was_kept_as_before_or_after_it(
    density: float, momentum: float
) -> None:
    def kept(group: Group, point: int) -> tuple[bool, Any, Any]:
        """Whether the second step was interrupted, and what is kept before and after it."""
        state = TopK(
            density, momentum=momentum, min_numel=1, wire_dtype=torch.bfloat16, group=group
        )
        weft.sync_sparsified([drawn(group, 0, 90)], state)
        before = copy.deepcopy(state.state_dict())
        tracer, is_interrupted = sys.gettrace(), False
        sys.settrace(interrupt_at(point))
        try:
            weft.sync_sparsified([drawn(group, 1, 90)], state)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(tracer)
        return is_interrupted, before, state.state_dict()

    _, before, after = run(1, kept, -1)[0]
    points = 0
    while (found := run(1, kept, points + 1)[0])[0]:
        points += 1
        is_done = found[2]["steps"] == after["steps"]
        torch.testing.assert_close(found[2], after if is_done else before, rtol=0, atol=1e-5)
    assert points > 5


@spmd(1, 2, on=("threads",))
def test_what_was_kept_is_sent_with_a_whole_tensor(group: Group) -> None:
    """A call may send a tensor whole that was sent in part before."""
    state = TopK(0.1, min_numel=1, group=group)
    given, got = torch.zeros(90), torch.zeros(90)
    for step, density in enumerate((None, 1, 0.1, 1)):
        tensor = whole_numbers(group, step, 90)
        given += tensor
        weft.sync_sparsified([tensor], state, density)
        got += tensor
    assert torch.equal(group.size * got, sum(everywhere(group, given)))


@pytest.mark.parametrize("density", [1, 0.1])
@spmd(1, 2, 4, on=("processes",))
@trained
def test_each_parameter_is_sparsified_by_itself(
    group: Group, tmp_path: Path, density: float
) -> None:
    """However they are packed, in steps that accumulate, too; a sparse one is not."""
    for options in OPTIONS:
        sparse = "gradient_as_bucket_view" in options
        plain = model_of(sparse)
        ours = wrapped(plain, TopK(density, min_numel=100), **options)
        residuals = [torch.zeros_like(each) for each in plain.parameters()]
        for step in range(3):
            for model in (ours, plain):
                model.zero_grad()
                with model.no_sync() if step and model is ours else contextlib.nullcontext():
                    loss_of(model, 10 * step).backward()
                if step:
                    loss_of(model, step).backward()
            own = gradients(plain)
            for found, residual, gradient in zip(gradients(ours), residuals, own, strict=True):
                residual += gradient
                count = len(residual.flatten())
                if count >= 100 and not (sparse and count == 800):
                    count = math.ceil(density * count)
                order = residual.abs().flatten().sort(descending=True, stable=True).indices
                sent = torch.zeros_like(residual)
                sent.view(-1)[order[:count]] = residual.view(-1)[order[:count]]
                residual -= sent
                dist.all_reduce(sent)
                torch.testing.assert_close(found, sent / group.size)


class Branches(nn.Module):
    """Of two linear layers, the second of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8, bias=False)
        self.branch = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.trunk(x) + self.branch(x) if both else self.trunk(x)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.25, "min_numel": 1},
        {"density": 0.25, "min_numel": 1, "total_density": 0.1},
        {"density": 0.25, "wire_dtype": torch.bfloat16},  # sent whole: what rounding left is kept
    ],
    ids=["part", "part of the result", "whole"],
)
@spmd(2, on=("processes",))
@trained
def test_what_is_kept_of_a_parameter_that_no_rank_uses_stays(
    group: Group, tmp_path: Path, settings: dict[str, Any], is_view: bool
) -> None:
    """DistributedDataParallel throws its mean away; what one rank uses, all ranks get."""
    torch.manual_seed(0)
    state = TopK(**settings)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": is_view}
    model = wrapped(Branches(), state, **options)
    torch.manual_seed(dist.get_rank())
    for users in ({0, 1}, set(), {0}, set()):
        before = copy.deepcopy(state.state_dict(model)["residual"])
        model.zero_grad()
        model(torch.randn(4, 8), dist.get_rank() in users).pow(2).sum().backward()
        after = state.state_dict(model)["residual"]
        assert after["branch.weight"].any()
        assert (model.module.branch.weight.grad is None) == (not users)
        if not users:
            assert torch.equal(after["branch.weight"], before["branch.weight"])


@spmd(3, on=("processes",))
@trained
def test_each_parameter_of_a_model_has_its_own_part_of_the_result(
    group: Group, tmp_path: Path
) -> None:
    """However they are packed; a copy of the state that is given what is kept goes on."""
    for options in OPTIONS:
        plain = model_of()
        state = TopK(0.1, total_density=0.05, min_numel=100)
        ours = wrapped(plain, state, **options)
        residuals = [torch.zeros_like(each).flatten() for each in plain.parameters()]
        for step in range(3):
            if step == 2:
                kept, state = state.state_dict(ours), copies(state)[1]
                ours = wrapped(plain, state, **options)
                state.load_state_dict(kept, ours)
            for model in (ours, plain):
                model.zero_grad()
                loss_of(model, step).backward()
            for found, residual, own in zip(
                gradients(ours), residuals, gradients(plain), strict=True
            ):
                residual += own.flatten()
                count = len(residual)
                share = (0.1, 0.05) if count >= 100 else (1, 1)
                where = largest(residual, math.ceil(share[0] * count))
                sent = torch.zeros_like(residual).index_copy_(0, where, residual[where])
                mean = sent.clone()
                dist.all_reduce(mean)
                mean /= group.size
                shared = largest(mean, math.ceil(share[1] * count))
                wanted = torch.zeros_like(mean).index_copy_(0, shared, mean[shared])
                torch.testing.assert_close(found.flatten(), wanted)
                residual[shared] -= sent[shared]


@spmd(2, on=("processes",))
@trained
def test_complex_parameters_are_sparsified_as_their_real_numbers(
    group: Group, tmp_path: Path
) -> None:
    torch.manual_seed(1 + group.rank)
    given = torch.randn(3, 4, dtype=torch.complex64)
    plain = nn.Linear(4, 100, bias=False, dtype=torch.complex64)
    for density, most in ((1, 800), (0.1, 160)):
        ours = wrapped(plain, TopK(density, min_numel=1))
        ours(given).abs().pow(2).mean().backward()
        found = ours.module.weight.grad
        assert 0 < torch.view_as_real(found).count_nonzero() <= most
        if density == 1:
            same = copy.deepcopy(ours.module)
            same.zero_grad()
            same(given).abs().pow(2).mean().backward()
            dist.all_reduce(same.weight.grad)
            torch.testing.assert_close(found, same.weight.grad / group.size)


def test_no_parameter_gets_the_name_of_one_that_is_gone() -> None:
    """A layer that is replaced may have the memory, and so the id, of the one before."""
    sparsifier = TopK().sparsifier
    names = [sparsifier.names_of([torch.ones(1), torch.ones(1)]) for _ in range(5)]
    assert names == [[f"float32 -{2 * n + 2}", f"float32 -{2 * n + 1}"] for n in range(5)]


@spmd(2, on=("processes",))
@trained
def test_a_compiled_model_has_the_same_losses(group: Group, tmp_path: Path) -> None:
    """Its graph is cut where buckets end."""
    plain = nn.Sequential(model_of(), nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 4))
    wanted, model = (wrapped(plain, TopK(0.05, min_numel=9), bucket_cap_mb=1.1) for _ in "ab")
    assert losses(torch.compile(model, backend="aot_eager"), range(3)) == losses(wanted, range(3))


def copies(it: Any) -> tuple[Any, Any]:
    file = io.BytesIO()
    torch.save(it, file)
    file.seek(0)
    return copy.deepcopy(it), torch.load(file, weights_only=False)


@spmd(2, on=("processes",))
@trained
def test_a_copy_of_a_model_has_its_own_weights(group: Group, tmp_path: Path) -> None:
    """And no hook, as with any of torch's; it can be registered."""
    for sparsified in (False, True):
        model = wrapped(model_of(sparse=True), TopK(0.1) if sparsified else None)
        if not sparsified:
            weft.ddp.register(model)
        losses(model, range(2))
        before = [each.clone() for each in model.parameters()]
        for twin in copies(model):
            nn.init.constant_(twin.module[3].bias, 700.0)
            assert loss_of(model, 0) < 100 < loss_of(twin, 0)
            if sparsified:  # plain: gloo must not carry a sparse gradient beside others
                with twin.no_sync():
                    losses(twin, range(2))
            else:
                state = weft.ddp.register(twin)
                losses(twin, range(2))
                assert state.calls
        assert all(map(torch.equal, model.parameters(), before))


@spmd(2, on=("processes",))
@trained
def test_a_job_that_restarts_goes_on_to_the_same_losses(group: Group, tmp_path: Path) -> None:
    """Also with other buckets than it had."""
    settings: dict[str, Any] = {"momentum": 0.5, "min_numel": 100, "warmup_steps": 5}
    state = TopK(0.05, **settings)
    model = wrapped(model_of(), state)
    losses(model, range(3))
    kept, weights = copy.deepcopy(state.state_dict(model)), copy.deepcopy(model.module)
    loaded, (twin, third) = TopK(0.05, **settings), copies(state)
    wanted = losses(model, range(3, 8))
    buckets = {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}
    for again, options in ((loaded, {}), (twin, buckets), (third, {})):
        resumed = wrapped(weights, again, **options)
        again.load_state_dict(kept, resumed)
        assert losses(resumed, range(3, 8)) == wanted
    assert losses(wrapped(weights, TopK(0.05, **settings)), range(3, 8)) != wanted


@spmd(2, on=("processes",))
@trained
def test_errors_are_raised_in_backward_and_the_next_step_works(
    group: Group, tmp_path: Path
) -> None:
    state = TopK(0.1, algorithm=["gather", "split"][dist.get_rank()], min_numel=100)
    model = wrapped(model_of(), state)
    with pytest.raises(WeftError, match=r"algorithm: .*gather.*split"):
        loss_of(model, 0).backward()
    state.algorithm = "split"
    loss_of(model, 1).backward()
    assert state.calls[-1].union > 0
    kept = state.state_dict(model)
    narrow, deep = nn.Sequential(*model_of()[:3]), nn.Sequential(model_of(), nn.Linear(4, 90))
    narrow.append(nn.Linear(30, 3))
    of_another, without_model = TopK(0.1, min_numel=100), TopK(0.1, min_numel=100)
    with pytest.raises(WeftError, match=r"kept of '0.weight', and the model has no parameter of"):
        of_another.load_state_dict(kept, deep)
    with pytest.raises(WeftError, match=r"under their names: pass the model"):
        state.state_dict()
    without_model.load_state_dict(kept)
    for plain, number, match in (
        (deep, TopK(0.1 + dist.get_rank()), r"^rank 1: density is 1.1"),
        (
            deep,
            [weft.ddp.State(), TopK()][dist.get_rank()],
            r"differ in kind of state: .*State.*TopK",
        ),
        (narrow, of_another, r"numbers are kept of tensor 'float32 -\d', which has"),
        (narrow, without_model, r"kept of '0.weight', .* pass the model to load_state_dict"),
    ):
        wrong = wrapped(plain, number)
        if number is of_another:
            number.load_state_dict(kept, wrong)
        with pytest.raises(WeftError, match=match):
            loss_of(wrong, 0).backward()


@spmd(2, on=("processes",))
@trained
def test_a_job_that_goes_on_with_a_frozen_block_has_the_residuals_of_the_others(
    group: Group, tmp_path: Path
) -> None:
    """Blocks are alike; what is kept of the frozen one waits until it is trained again."""
    settings: dict[str, Any] = {"density": 0.1, "min_numel": 1}
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    state = TopK(**settings)
    model = wrapped(blocks, state)
    model(drawn(group, 0, 4, 8)).pow(2).sum().backward()
    kept = copy.deepcopy(state.state_dict(model))
    model.module[2].requires_grad_(False)
    model.zero_grad(set_to_none=True)
    resumed, state = DistributedDataParallel(model.module), TopK(**settings)
    resumed.register_comm_hook(state, topk_hook)
    state.load_state_dict(kept, resumed)
    resumed(drawn(group, 1, 4, 8)).pow(2).sum().backward()
    now = state.state_dict(model.module)
    assert now["steps"] == {name: 1 if name[0] == "2" else 2 for name in kept["steps"]}
    for name, parameter in model.module.named_parameters():
        was, is_now = kept["residual"][name], now["residual"][name]
        if parameter.requires_grad:
            plain = copy.deepcopy(model.module)
            plain.zero_grad()
            plain(drawn(group, 1, 4, 8)).pow(2).sum().backward()
            unsent = was + plain.get_parameter(name).grad.flatten() - is_now
            assert unsent.count_nonzero() <= math.ceil(0.1 * parameter.numel())
        else:
            assert torch.equal(was, is_now)
