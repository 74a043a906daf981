"""The figures of the table, from steps whose every value is known."""

import math

import pytest

from weft.cli.demo.record import (
    PARTS,
    TOLERANCE,
    Outcome,
    Reduction,
    Run,
    Step,
    Summary,
    agreement,
    speedups,
    step_bytes,
)


def reduction(rows: int, total: int, union: int, sent: int = 0, name: str = "split") -> Reduction:
    return Reduction(name, rows, total, union, messages=3, sent=sent, bound=sent // 2)


def step(
    number: int, *, loss: float = 1.0, gradient: float = 1.0, scale: float = 1.0, tables=()
) -> Step:
    """Parts of 1, 2, 3, 4, 5 and 6 ms times `scale`; in flight for 10 of them."""
    times = {part: (at + 1) * 1e-3 * scale for at, part in enumerate(PARTS)}
    return Step(
        number=number,
        clock=number + 1.0,
        loss=loss,
        gradient=gradient,
        in_flight=10e-3 * scale,
        reductions=tuple(tables),
        **times,
    )


def run(way: str, losses: list[float], ranks: int = 2, wanted: int | None = None, **more) -> Run:
    made = Run(way, len(losses) if wanted is None else wanted, ranks)
    for rank in range(ranks):
        made.add(rank, [step(n, loss=loss, **more) for n, loss in enumerate(losses)])
    return made


def test_a_step_is_the_sum_of_its_parts() -> None:
    one = step(0)
    assert one.seconds == pytest.approx(21e-3)
    assert one.synchronisation == pytest.approx(3e-3 + 5e-3)  # handing over and waiting


def test_a_run_counts_the_steps_that_every_rank_reported() -> None:
    made = Run("weft", 5, 2)
    made.add(0, [step(0, loss=1.0), step(1, loss=2.0), step(2)])
    assert made.done == 0
    made.add(1, [step(0, loss=3.0), step(1, loss=4.0)])
    assert made.done == 2 and made.values("loss") == [2.0, 3.0]
    assert made.note == "2 of 5 steps: time limit"
    made.interrupted = True
    assert made.note == "2 of 5 steps: interrupted"


def test_weft_figures_add_up_tables_and_average_ranks() -> None:
    made = Run("weft", 1, 2)
    made.add(0, [step(0, tables=[reduction(10, 30, 25, 400), reduction(1, 4, 3, 40, "gather")])])
    made.add(1, [step(0, tables=[reduction(20, 30, 25, 600), reduction(3, 4, 3, 60, "gather")])])
    (found,) = made.reductions()
    assert found.algorithm == "split + gather"
    assert (found.rows, found.total, found.union, found.sent) == (17, 34, 28, 550)
    assert made.algorithms == {"split": 1, "gather": 1}
    assert run("torch", [1.0]).reductions() == []


def test_bytes_of_the_ways() -> None:
    ranks, dim, vocabulary = 4, 8, 100
    weft = run("weft", [1.0] * 3, ranks, tables=[reduction(10, 40, 25, sent=777)])
    torch, dense = run("torch", [1.0] * 2, ranks), run("dense", [1.0], ranks)

    def sent(of: Run) -> list[float]:
        return step_bytes(of, weft, vocabulary=vocabulary, dim=dim)

    assert sent(weft) == [777.0] * 3
    assert sent(torch) == [3 / 4 * 40 * (8 + 8 * 4)] * 2
    assert sent(dense) == [2 * 3 / 4 * (2 * 100 * 8 * 4)]


def test_no_figure_is_made_up_for_steps_that_weft_did_not_do() -> None:
    weft = run("weft", [1.0], tables=[reduction(10, 20, 15)])
    assert len(step_bytes(run("torch", [1.0] * 5), weft, vocabulary=9, dim=2)) == 1


def test_a_summary() -> None:
    made = run("weft", [4.0] * 9 + [2.0])
    made.outcomes = [Outcome(500, 300), Outcome(700, 650)]
    found = Summary.of(made, [10.0, 30.0, 20.0], batch=100)
    assert found.step == pytest.approx(21e-3) and found.synchronisation == pytest.approx(8e-3)
    assert found.tokens == pytest.approx(2 * 100 / 21e-3)
    assert found.hidden == pytest.approx(1 - 5 / 10)  # waited 5 ms of 10 in flight
    assert (found.sent, found.computed, found.peak, found.growth) == (20.0, False, 700, 200)
    assert found.loss == 2.0 and found.note == ""


def test_medians_are_not_moved_by_a_slow_first_step() -> None:
    made = Run("torch", 5, 1)
    made.add(0, [step(n, scale=100.0 if n == 0 else 1.0) for n in range(5)])
    found = Summary.of(made, [], batch=1)
    assert found.step == pytest.approx(21e-3) and found.sent is None and found.computed
    assert found.peak is None


def test_losses_that_agree() -> None:
    one, two = run("weft", [4.0, 3.0, 2.0]), run("torch", [4.0, 3.0 * (1 + 5e-5)])
    found = agreement(one, two)
    assert found is not None and found.agrees
    assert (found.steps, found.at) == (2, 1)
    assert found.difference == pytest.approx(5e-5, rel=1e-3)
    assert str(found).startswith("weft and PyTorch sparse agree over 2 steps: losses and gradients")


@pytest.mark.parametrize("other", [2.0 * (1 + 2 * TOLERANCE), math.nan, math.inf, -2.0])
def test_losses_that_do_not_agree(other: float) -> None:
    found = agreement(run("weft", [4.0, 2.0]), run("dense", [4.0, other]))
    assert found is not None and not found.agrees and found.at == 1
    assert "DO NOT AGREE" in str(found)


def test_gradients_of_another_length_do_not_agree() -> None:
    found = agreement(run("weft", [4.0, 2.0]), run("torch", [4.0, 2.0], gradient=4.0))
    assert found is not None and not found.agrees and (found.what, found.at) == ("gradient", 0)


def test_nothing_to_compare() -> None:
    assert agreement(run("weft", [1.0]), run("torch", [], wanted=3)) is None


def test_speedups_are_ratios_of_steps() -> None:
    weft = Summary.of(run("weft", [1.0]), [], batch=1)
    slow = Summary.of(run("torch", [1.0], scale=2.5), [], batch=1)
    quick = Summary.of(run("dense", [1.0], scale=0.5), [], batch=1)
    assert speedups([weft, slow, quick]) == [
        "2.5x as fast as PyTorch sparse",
        "0.5x as fast as PyTorch dense",
    ]
