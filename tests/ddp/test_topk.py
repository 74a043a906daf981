"""Gradients of which a share is sent: `weft.ddp.TopK`, `topk_hook` and `weft.sync_sparsified`."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from cases import in_default_group
from weft.base.errors import WeftError, WireError
from weft.ddp import TopK, sparsify, topk_hook
from weft.ddp import largest as largest_of
from weft.ddp.largest import largest_by_sort, largest_entries
from weft.testing import run, spmd

OPTIONS = (
    {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
)


def everywhere(group, tensor):
    """A tensor of each rank."""
    return list(weft.all_to_all([tensor] * group.size, group=group))


def drawn(group, step, *shape):
    """Numbers of this rank, a few of them large."""
    generator = torch.Generator().manual_seed(100 * step + group.rank)
    return torch.randn(shape, generator=generator) ** 3


def trained(body):
    """In a default group, which DistributedDataParallel wants, and weft over it, by a `wire`."""

    @functools.wraps(body)
    def inside(group, tmp_path, **given):
        wire = given.get("wire")
        with in_default_group(group, tmp_path), weft.init(timeout=60, wire=wire):
            body(group, tmp_path, **given)

    return inside


def model_of(sparse=False):
    torch.manual_seed(5)
    table = nn.EmbeddingBag(40, 20, sparse=sparse, mode="sum")
    return nn.Sequential(table, nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))


def wrapped(model, state, **options):
    made = DistributedDataParallel(copy.deepcopy(model), **options)
    if state is not None:
        made.register_comm_hook(state, topk_hook)
    return made


def loss_of(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    out = model(torch.randint(0, 40, (6, 3), generator=generator))
    return out.pow(2).mean()


def gradients(model):
    return [each.grad.to_dense().clone() for each in model.parameters()]


def losses(model, steps):
    """Of some steps of plain SGD."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


NUMBERS = {
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
def test_the_largest_are_found(kind, count, aims, monkeypatch):
    """Also where a sample misleads: in rows of one scale each, with ties, with mostly zeros."""
    monkeypatch.setattr(largest_of, "AIMS", aims)
    size = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)).abs()
    size = NUMBERS[kind](size).flatten()
    order = size.sort(descending=True, stable=True).indices[:count]  # of equal numbers the first
    wanted = order[size[order] > 0].sort().values
    assert torch.equal(largest_entries(size, count), wanted)
    places, number = largest_by_sort(size, count)  # as on an accelerator
    assert torch.equal(places[:number], wanted)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"error_feedback": False}])
@spmd(1, 3, on=("threads",))
def test_what_is_not_sent_is_kept(group, settings, wire_dtype):
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
    residual, feedback = state.state_dict(), settings.get("error_feedback", True)
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


@spmd(4, on=("threads", "verbs", "processes", "gloo"))
def test_the_largest_of_each_rank_are_averaged(group):
    tensors = [drawn(group, 1, 1000), drawn(group, 2, 30, 30).t(), drawn(group, 3, 64).bfloat16()]
    before = [each.clone() for each in tensors]
    weft.sync_sparsified(tensors, TopK(0.02, min_numel=50, group=group))
    for found, own in zip(tensors, before, strict=True):
        flat = own.contiguous().flatten()
        where = flat.float().abs().topk(math.ceil(0.02 * len(flat))).indices
        mine = torch.zeros(len(flat)).index_copy_(0, where, flat[where].float())
        wanted = (sum(everywhere(group, mine)) / group.size).to(own.dtype)
        torch.testing.assert_close(found.contiguous().flatten(), wanted)


@spmd(2, on=("threads",))
def test_numbers_that_are_none_are_sent_and_not_kept(group):
    """However many: the next step is as if they had not been."""
    state = TopK(0.01, min_numel=1, group=group)
    bad = torch.ones(1000)
    bad[100:400] = math.nan if group.rank else 1
    weft.sync_sparsified([bad], state)
    assert not bad.isfinite().all()
    later = drawn(group, 1, 1000)
    weft.sync_sparsified([later], state)
    assert later.isfinite().all() and later.any()
    assert all(each.isfinite().all() for each in state.state_dict().values())
    small = torch.tensor([1.0, math.nan])  # sent whole, rounded
    weft.sync_sparsified([small], TopK(wire_dtype=torch.bfloat16, group=group))
    assert small[0] == 1 and small[1].isnan()
    zeros, nothing = TopK(0.01, min_numel=1, group=group), torch.zeros(1000)
    weft.sync_sparsified([nothing], zeros)
    assert not nothing.any() and zeros.calls[-1].rows == 0


def whole_numbers(group, step, *shape):
    """Gradients whose means are exact in float32, with many of the same magnitude."""
    generator = torch.Generator().manual_seed(100 * step + group.rank)
    return torch.randint(-6, 7, shape, generator=generator).float() * group.size


def distance(group, density, feedback=True):
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
def test_training_needs_what_was_not_sent(group):
    """The largest entries of a rank stay large: without feedback it never sends the others."""
    assert distance(group, 1.0) < 1e-3
    assert distance(group, 0.1) < 0.05
    assert distance(group, 0.1, feedback=False) > 0.3


def refused(group, text, *given):
    """`sync_sparsified` raises the same on every rank, and changes nothing."""
    with pytest.raises(WeftError, match=text) as caught:
        weft.sync_sparsified(*given)
    said = torch.tensor([*str(caught.value).encode()], dtype=torch.uint8)
    assert all(torch.equal(said, other) for other in everywhere(group, said))


@spmd(3, on=("threads",))
def test_who_is_wrong_is_named_on_every_rank(group):
    me, good = group.rank == 1, {"min_numel": 1, "group": group}
    settings = {
        r"^rank 1: density is 0: pass the share": {"density": 0},
        r"differ in density: .*rank 1 has 0.5": {"density": 0.5},
        r"^rank 1: density is 2: pass the share": {"density": 2},
        r"^rank 1: min_numel is -1: pass a whole number, at least 0": {"min_numel": -1},
        r"^rank 1: error_feedback is 1: pass True or False": {"error_feedback": 1},
        r"^rank 1: wire_dtype is torch.int8": {"wire_dtype": torch.int8},
    }
    for text, wrong in settings.items():
        refused(group, text, [torch.ones(9)], TopK(**(good | (wrong if me else {}))))
    state = TopK(0.2, **good)
    weft.sync_sparsified([drawn(group, 0, 9)], state)
    kept = copy.deepcopy(state.state_dict())
    for tensors, text in (
        ([torch.ones(8)], r"^rank 1: 9 numbers are kept of tensor '0', which has 8"),
        ([torch.ones(9)] * 2, r"^the ranks differ in tensors: [^;]*'1' [^;]*; pass[^;]*$"),
        ([torch.ones(3, 3)], r"differ in tensors: .*rank 1 has '0' float32 \(3, 3\); pass"),
        ({1: torch.ones(9), "1": torch.ones(9)}, r"^rank 1: two keys of tensors are '1'"),
        ([torch.ones(9, dtype=torch.int64)], r"^rank 1: tensor 0 is torch.int64"),
        ([torch.ones(9).to(torch.float8_e5m2)], r"^rank 1: tensor 0 is torch.float8"),
        ([torch.inference_mode()(torch.ones)(9)], r"^rank 1: tensor 0 is of inference mode"),
        (torch.ones(9), r"^rank 1: tensors is a Tensor: pass a list"),
        ([torch.ones(1).expand(9)], r"^rank 1: tensor 0 is one whose elements"),
    ):
        usual = torch.arange(9.0)
        refused(group, text, tensors if me else [usual], state)
        assert usual.tolist() == [*range(9)]
        torch.testing.assert_close(state.state_dict(), kept, rtol=0, atol=0)
    weft.sync_sparsified([torch.ones(9)], state)
    other, pair = TopK(**good), [torch.arange(9.0), torch.arange(9.0, dtype=torch.float64)]
    other.load_state_dict({"1": torch.ones(9 + me)})
    refused(group, r"^rank 1: 10 numbers are kept of tensor '1'", pair, other)
    assert [each.tolist() for each in pair] == [[*range(9)]] * 2
    for wrong in (3, [torch.ones(9)], {"0": 3}):
        with pytest.raises(WeftError, match="takes what state_dict"):
            state.load_state_dict(wrong)
    for other in state, TopK(**good):  # not connected yet
        refused(group, r"^rank 1: state is a dict: pass a", [torch.ones(9)], {} if me else other)


MARKED = 77.0  # the first number of a tensor of which a rank cannot pick what it sends


def troubled_by_marks(works):
    """A function of numbers that has no memory for those that are marked."""

    def inside(*given):
        if any(isinstance(each, Tensor) and each[0] == MARKED for each in given):
            raise MemoryError("no memory")
        return works(*given)

    return inside


@pytest.mark.parametrize("numel", [90, 9])  # of a tensor that is sent in part, and of a whole one
@spmd(1, 3, on=("threads",))
def test_trouble_of_one_rank_is_raised_on_all_and_nothing_is_lost(group, numel, monkeypatch):
    """Also where the entries of other tensors were picked before."""
    for name in ("entries_to_send", "_whole_of"):
        monkeypatch.setattr(sparsify, name, troubled_by_marks(getattr(sparsify, name)))
    state, like = (TopK(0.2, min_numel=20, group=group) for _ in "ab")
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
        torch.testing.assert_close(state.state_dict(), before, rtol=0, atol=0)
    given["new"] = wanted["new"].clone()
    weft.sync_sparsified(given, state)
    weft.sync_sparsified(wanted, like)
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_raised_can_be_repeated(ranks, kind, monkeypatch):
    """Nothing is kept of it, whatever was raised: on a new group it counts once."""
    failing = set()
    has_begun = threading.Barrier(ranks)  # no rank's first step sees the trouble of the second
    works = sparsify.reduce_dense

    def troubled(group, *given):
        if group.rank in failing:
            raise kind("trouble")
        return works(group, *given)

    def tensors_of(group, number):
        """Of step 0 or 1, which has two that are new; those of 9 numbers are sent whole."""
        sizes = [(90, 9), (90, 9, 90, 9)][number]
        return [whole_numbers(group, 4 * number + n, size) for n, size in enumerate(sizes)]

    def state_of(group):
        return TopK(0.2, min_numel=20, group=group)

    def interrupted(group):
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
        torch.testing.assert_close(state.state_dict(), before, rtol=0, atol=0)
        return state.state_dict()

    def repeated(group, kept):
        state, like = state_of(group), state_of(group)
        state.load_state_dict(kept[group.rank])
        weft.sync_sparsified(tensors_of(group, 0), like)
        found, wanted = tensors_of(group, 1), tensors_of(group, 1)
        weft.sync_sparsified(found, state)
        weft.sync_sparsified(wanted, like)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(state.state_dict(), like.state_dict())

    monkeypatch.setattr(sparsify, "reduce_dense", troubled)
    kept = run(ranks, interrupted)
    failing.clear()
    run(ranks, repeated, kept)


@spmd(1, 2, on=("threads",))
def test_what_was_kept_is_sent_with_a_whole_tensor(group):
    """A state of another density goes on from what was kept."""
    part, whole = (TopK(density, min_numel=1, group=group) for density in (0.1, 1))
    given, got = torch.zeros(90), torch.zeros(90)
    for step, (state, other) in enumerate(((part, whole), (whole, part)) * 2):
        tensor = whole_numbers(group, step, 90)
        given += tensor
        weft.sync_sparsified([tensor], state)
        got += tensor
        assert bool(state.state_dict()) == (state is part)
        other.load_state_dict(state.state_dict())
    assert torch.equal(group.size * got, sum(everywhere(group, given)))


@pytest.mark.parametrize("wire", ["tcp", "group"])
@pytest.mark.parametrize("density", [1, 0.1])
@spmd(1, 2, 4, on=("processes",))
@trained
def test_each_parameter_is_sparsified_by_itself(group, tmp_path, density, wire):
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

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8, bias=False)
        self.branch = nn.Linear(8, 8, bias=False)

    def forward(self, x, both):
        return self.trunk(x) + self.branch(x) if both else self.trunk(x)


@pytest.mark.parametrize("wire", ["tcp", "group"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.25, "min_numel": 1},
        {"density": 0.25, "wire_dtype": torch.bfloat16},  # sent whole: what rounding left is kept
    ],
    ids=["part", "whole"],
)
@spmd(2, on=("processes",))
@trained
def test_what_is_kept_of_a_parameter_that_no_rank_uses_stays(
    group, tmp_path, settings, is_view, wire
):
    """DistributedDataParallel throws its mean away; what one rank uses, all ranks get."""
    torch.manual_seed(0)
    state = TopK(**settings)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": is_view}
    model = wrapped(Branches(), state, **options)
    torch.manual_seed(dist.get_rank())
    for users in ({0, 1}, set(), {0}, set()):
        before = copy.deepcopy(state.state_dict(model))
        model.zero_grad()
        model(torch.randn(4, 8), dist.get_rank() in users).pow(2).sum().backward()
        after = state.state_dict(model)
        assert after["branch.weight"].any()
        assert (model.module.branch.weight.grad is None) == (not users)
        if not users:
            assert torch.equal(after["branch.weight"], before["branch.weight"])


@spmd(2, on=("processes",))
@trained
def test_complex_parameters_are_sparsified_as_their_real_numbers(group, tmp_path):
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


def test_no_parameter_gets_the_residual_of_one_that_is_gone():
    """A layer that is replaced may have the memory, and so the id, of the one before."""
    sparsifier = TopK().sparsifier
    for _ in range(5):
        parameter = torch.ones(1)
        assert parameter not in sparsifier.of_parameters
        sparsifier.of_parameters[parameter] = torch.ones(1)
        del parameter
    assert not len(sparsifier.of_parameters)


@spmd(2, on=("processes",))
@trained
def test_a_compiled_model_has_the_same_losses(group, tmp_path):
    """Its graph is cut where buckets end."""
    plain = nn.Sequential(model_of(), nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 4))
    wanted, model = (wrapped(plain, TopK(0.05, min_numel=9), bucket_cap_mb=1.1) for _ in "ab")
    assert losses(torch.compile(model, backend="aot_eager"), range(3)) == losses(wanted, range(3))


def copies(it):
    file = io.BytesIO()
    torch.save(it, file)
    file.seek(0)
    return copy.deepcopy(it), torch.load(file, weights_only=False)


@spmd(2, on=("processes",))
@trained
def test_a_copy_of_a_model_has_its_own_weights(group, tmp_path):
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
def test_a_job_that_restarts_goes_on_to_the_same_losses(group, tmp_path):
    """Also with other buckets than it had."""
    settings = {"min_numel": 100}
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
def test_errors_are_raised_in_backward_and_the_next_step_works(group, tmp_path):
    state = TopK(0.1, min_numel=100)
    state.algorithm = ["gather", "split"][dist.get_rank()]  # of the table
    model = wrapped(model_of(sparse=True), state)
    with pytest.raises(WeftError, match=r"algorithm: .*gather.*split"):
        loss_of(model, 0).backward()
    state.algorithm = "split"
    loss_of(model, 1).backward()
    assert state.calls[-1].union > 0
    kept = state.state_dict(model)
    narrow, deep = nn.Sequential(*model_of()[:3]), nn.Sequential(model_of(), nn.Linear(4, 90))
    narrow.append(nn.Linear(30, 3))
    of_another, without_model = TopK(0.1, min_numel=100), TopK(0.1, min_numel=100)
    with pytest.raises(WeftError, match=r"kept of '3.weight', and the model has no parameter of"):
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
        (narrow, of_another, r"numbers are kept of tensor '\d', which has"),
        (narrow, without_model, r"kept of '1.weight', .* pass the model to load_state_dict"),
    ):
        wrong = wrapped(plain, number)
        if number is of_another:
            number.load_state_dict(kept, wrong)
        with pytest.raises(WeftError, match=match):
            loss_of(wrong, 0).backward()


@spmd(2, on=("processes",))
@trained
def test_a_job_that_goes_on_with_a_frozen_block_has_the_residuals_of_the_others(group, tmp_path):
    """Blocks are alike; what is kept of the frozen one waits until it is trained again."""
    settings = {"density": 0.1, "min_numel": 1}
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
    for name, parameter in model.module.named_parameters():
        was, is_now = kept[name], now[name]
        if parameter.requires_grad:
            plain = copy.deepcopy(model.module)
            plain.zero_grad()
            plain(drawn(group, 1, 4, 8)).pow(2).sum().backward()
            unsent = was + plain.get_parameter(name).grad.flatten() - is_now
            assert unsent.count_nonzero() <= math.ceil(0.1 * parameter.numel())
        else:
            assert torch.equal(was, is_now)
