"""The training program of one rank: batches, model, and the clock of what is under way."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.cli.demo import train
from weft.cli.demo.settings import NEGATIVES, WINDOW


def batches(rank: int = 0, seed: int = 0, batch: int = 5000) -> train.Batches:
    tokens = np.arange(1000, dtype=np.int32)  # a token is its own place
    negatives = np.array([2000, 2001], dtype=np.int32)
    return train.Batches(tokens, negatives, batch, seed, rank)


def test_a_batch_depends_on_seed_rank_and_step_alone() -> None:
    first = batches()(3)
    for one, two in zip(first, batches()(3), strict=True):
        assert torch.equal(one, two)
    for other in (batches()(4), batches(rank=1)(3), batches(seed=1)(3)):
        assert not torch.equal(first[0], other[0])


def test_contexts_are_within_the_window_near_ones_more_often() -> None:
    words, others = batches(batch=50_000)(0)
    assert words.dtype == others.dtype == torch.int64
    assert others.shape == (50_000, 1 + NEGATIVES)
    distance = others[:, 0] - words
    assert set(distance.tolist()) == set(range(-WINDOW, WINDOW + 1)) - {0}
    counts = torch.bincount(distance.abs(), minlength=WINDOW + 1)[1:]
    assert (counts[:-1] > counts[1:]).all()
    assert abs(int((distance > 0).sum()) - 25_000) < 800  # 7 sd of a fair coin
    assert set(others[:, 1:].unique().tolist()) == {2000, 2001}


def test_batches_work_on_the_smallest_part_of_a_text() -> None:
    tokens = np.arange(2 * WINDOW + 1, dtype=np.int32)
    made = train.Batches(tokens, np.array([0], np.int32), 64, 0, 0)
    words, others = made(0)
    assert set(words.tolist()) == {WINDOW}
    assert int(others.min()) >= 0 and int(others.max()) <= 2 * WINDOW


def test_the_loss_is_that_of_the_paper_and_its_gradients_are_sparse() -> None:
    model = train.SkipGram(50, 4, seed=0, kept=None)
    with torch.no_grad():
        model.context.weight.normal_()
    words = torch.tensor([3, 7, 3])
    others = torch.tensor([[1, 2, 2, 9, 4, 1], [0, 5, 6, 7, 8, 9], [3, 3, 3, 3, 3, 3]])
    loss = model(words, others)
    loss.backward()
    wanted = torch.zeros(())
    for word, (true, *noise) in zip(words.tolist(), others.tolist(), strict=True):
        vector = model.word.weight[word]
        wanted = wanted - F.logsigmoid(model.context.weight[true] @ vector)
        for one in noise:
            wanted = wanted - F.logsigmoid(-(model.context.weight[one] @ vector))
    assert loss.item() == pytest.approx((wanted / 3).item(), rel=1e-6)
    found = model.word.weight.grad
    assert found is not None and found.is_sparse
    (dense,) = torch.autograd.grad(wanted / 3, [model.word.weight])
    torch.testing.assert_close(found.to_dense(), dense)


def test_every_rank_starts_from_the_same_tables_and_one_keeps_its_own(tmp_path: Path) -> None:
    plain = train.SkipGram(20, 3, seed=4, kept=None)
    kept = train.SkipGram(20, 3, seed=4, kept=tmp_path / "table")
    assert torch.equal(plain.word.weight, kept.word.weight)
    assert not torch.equal(plain.word.weight, train.SkipGram(20, 3, seed=5, kept=None).word.weight)
    with torch.no_grad():
        kept.word.weight[7] = 42.0
    found = np.fromfile(tmp_path / "table", np.float32).reshape(20, 3)
    np.testing.assert_array_equal(found, kept.word.weight.detach().numpy())


def test_the_ways_train_alike_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, in this process: every step is sent, in order, and all ways learn the same."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 40, 500).astype(np.int32))
    np.save(tmp_path / "negatives.npy", np.arange(40, dtype=np.int32))
    job = train.Job(
        ("weft", "torch", "dense"), 23, 16, 4, 1, None, 40, tmp_path / "tokens.npy",
        tmp_path / "negatives.npy", tmp_path / "table",
    )  # fmt: skip
    sent: dict[str, list] = {way: [] for way in job.ways}
    order = []

    def send(message) -> None:
        way, steps = message
        sent[way].extend(steps)
        order.append(way)

    monkeypatch.setattr(train.local, "send", send)
    train.train(job)
    assert [[step.number for step in steps] for steps in sent.values()] == [list(range(23))] * 3
    assert list(dict.fromkeys(order)) == list(job.ways) and order[-1] == "dense"
    for name in ("loss", "gradient"):
        weft, *others = ([getattr(step, name) for step in steps] for steps in sent.values())
        for other in others:
            assert other == pytest.approx(weft, rel=1e-5)
    assert sent["weft"][0].loss == pytest.approx(6 * np.log(2), rel=1e-4)  # knows nothing yet
    assert sent["weft"][-1].loss < sent["weft"][0].loss
    clocks = [step.clock for step in sent["weft"]]
    assert clocks == sorted(clocks) and clocks[-1] == pytest.approx(
        sum(step.seconds for step in sent["weft"])
    )
    assert np.fromfile(job.vectors, np.float32).reshape(40, 4).any()


def test_the_length_of_sparse_and_dense_gradients_is_the_same() -> None:
    indices, values = torch.tensor([[4, 1, 4]]), torch.tensor([[1.0, 2.0], [0.0, 2.0], [2.0, 2.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (6, 2), check_invariants=True)
    assert train._length([sparse, torch.ones(2, 2)]) == pytest.approx(33**0.5)
    assert train._length([sparse.to_dense(), torch.ones(2, 2)]) == pytest.approx(33**0.5)


def test_time_under_way_counts_once_where_sums_overlap() -> None:
    class Sum:
        reduction = None

        def __init__(self, began: float, ended: float) -> None:
            self.began, self.ended = began, ended

        def wait(self) -> torch.Tensor:
            raise NotImplementedError

    assert train._covered([]) == 0.0
    assert train._covered([Sum(0.0, 2.0), Sum(1.0, 3.0)]) == 3.0
    assert train._covered([Sum(5.0, 6.0), Sum(0.0, 1.0)]) == 2.0
    assert train._covered([Sum(0.0, 9.0), Sum(1.0, 2.0)]) == 9.0
