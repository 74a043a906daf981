"""The examples of weft.nn pass, alone and on a grid, and fail where a result is wrong."""

from __future__ import annotations

import argparse
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import weft
from weft.testing import run

PROGRAMS = ["sharded_linear/train.py", "halo_convolution/network.py"]


@pytest.fixture
def load(script):
    return lambda program: script(f"examples/{program}")


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_passes_alone_and_draws(load, monkeypatch, capsys, program):
    monkeypatch.setattr(sys, "argv", [program, "--picture"])
    load(program).main()
    printed = capsys.readouterr().out
    assert printed.startswith("0 values in 0 messages between 1 ranks\nrank 0 has (")
    assert printed.endswith("one process\nPASSED\n")


@pytest.mark.parametrize("regather", [False, True])
def test_sharded_training_is_that_of_one_process(load, monkeypatch, regather):
    example = load("sharded_linear/train.py")
    monkeypatch.setattr(example, "STEPS", 3)
    found = run(4, lambda group: example.compare(weft.Partition(4), regather=regather))
    assert found[0]["last"] < found[0]["first"]
    assert [each["kept"] < 0.3 for each in found] == [True] * 4


@pytest.mark.parametrize("part", [-1, 0])
def test_sharded_training_sees_what_is_wrong(load, monkeypatch, part):
    example = load("sharded_linear/train.py")
    monkeypatch.setattr(example, "STEPS", 2)
    whole = example.whole

    def changed():
        model = whole()
        model[part].weight.data[-1, -1] += 1e-6
        return model

    monkeypatch.setattr(example, "whole", changed)

    def program(group):
        with pytest.raises(SystemExit, match=r"FAILED: rank \d: weights or losses differ by"):
            example.compare(weft.Partition(2))

    run(2, program)


def test_the_halo_network_is_the_whole_one(load):
    example = load("halo_convolution/network.py")
    found = run(4, lambda group: example.compare(example.grid_of(group.size)))
    assert found[0]["compared"] == 8 and found[1:] == [{}] * 3


def test_the_halo_network_sees_what_is_wrong(load, monkeypatch):
    example = load("halo_convolution/network.py")
    halo = weft.nn.HaloExchange
    monkeypatch.setattr(weft.nn, "HaloExchange", lambda *args: halo(*args, "periodic"))

    def program(group):
        grid = example.grid_of(group.size)
        if group.rank:
            example.compare(grid)
            return
        with pytest.raises(SystemExit, match="FAILED: logits or its gradient differs"):
            example.compare(grid)

    run(2, program)


@pytest.fixture
def words(load, monkeypatch, tmp_path):
    """The example, of one file of the library."""
    example = load("sharded_words/train.py")
    shutil.copy(argparse.__file__, tmp_path)
    paths = SimpleNamespace(get_paths=lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(example, "sysconfig", paths)
    for name, size in (("DIM", 4), ("BATCH", 64), ("STEPS", 3)):
        monkeypatch.setattr(example, name, size)
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield example


def test_cut_word_vectors_learn_what_whole_ones_do(words):
    ways = words.WAYS[:3]
    found = run(4, lambda group: words.compare(group, ways))[0]
    whole, cut, shuffled = (found[way] for way in ways)
    assert shuffled["most"] < 0.9 * cut["most"]
    assert cut["losses"][-1] < cut["losses"][0] == pytest.approx(6 * 0.6931, rel=1e-3)
    assert 0.25 <= cut["kept"] / whole["kept"] < 0.26 and 0 < cut["sent"] < whole["sent"]


def test_cut_word_vectors_see_what_is_wrong(words, monkeypatch):
    shard = weft.nn.shard_embeddings

    def wrong(model, min_rows):
        shard(model, min_rows).word.weight.data.mul_(2)

    monkeypatch.setattr(weft.nn, "shard_embeddings", wrong)

    def program(group):
        with pytest.raises(SystemExit, match=r"FAILED: rank \d: the losses of sharded differ"):
            words.compare(group, words.WAYS[:2])

    run(2, program)


def test_cut_word_vectors_pass_alone(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    words.main()
    assert capsys.readouterr().out.endswith("apart\nPASSED\n")


def test_a_table_of_pages_that_are_not_written_trains(load, monkeypatch, capsys):
    example = load("sharded_words/large.py")
    whole = torch.nn.EmbeddingBag(1001, example.DIM, mode="sum", dtype=torch.bfloat16)
    update, alone = torch.optim.SGD([torch.nn.init.zeros_(whole.weight)], lr=0.1), []
    for step in range(5):
        draws = (example.batch(1001, 64, rank, step) for rank in (0, 1))
        ids, labels = (torch.cat(each) for each in zip(*draws, strict=True))
        scores = whole(ids).sum(1, dtype=torch.float32)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
        update.zero_grad()
        loss.backward()
        update.step()
        alone.append(loss.item())
    with torch.sparse.check_sparse_tensor_invariants(False):
        found = run(2, lambda group: example.train(group, rows=1001, bags=64, steps=3))
        monkeypatch.setattr(sys, "argv", ["large.py", "--gib", "0.001", "--steps", "1"])
        example.main()
    losses = torch.tensor([each["losses"] for each in found]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone), rtol=5e-3, atol=0)
    assert [each["shard"] for each in found] == [501 * 128, 500 * 128]
    assert all(1 <= each["sent"] / each["computed"] < 1.1 for each in found)
    assert capsys.readouterr().out.startswith("8,388 rows of 64 in bfloat16, 1 ranks: a shard of ")
