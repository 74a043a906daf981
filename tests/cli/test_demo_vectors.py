"""The word2vec text format, and nearest words by a brute-force count."""

from pathlib import Path

import numpy as np
import pytest

from weft.cli.demo import vectors

WORDS = ["the", "naïve", "x_1", "漢字"]
COUNTS = np.array([400, 300, 200, 100])


def table(words: int = 4, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((words, dim)).astype(np.float32)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    vectors.write_vectors(path, WORDS, table())
    words, found = vectors.read_vectors(path)
    assert words == WORDS
    np.testing.assert_allclose(found, table(), rtol=1e-5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["vectors.txt"]


def test_the_format_is_word2vecs(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    vectors.write_vectors(path, ["a", "b"], np.array([[1, -0.5], [1e-9, 1234567]], np.float32))
    assert path.read_text() == "2 2\na 1 -0.5\nb 1e-09 1.23457e+06\n"


@pytest.mark.parametrize("text", ["2 2\na 1 2\n", "1 2\na 1 2\nb 1 2\n", "1 3\na 1 2\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"vectors\.txt"):
        vectors.read_vectors(path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("before")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        vectors.write_vectors(path, WORDS, table(words=3))
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_nearest_words_by_cosine() -> None:
    words = [f"w{n}" for n in range(200)]
    counts = np.full(200, 100)
    rows = table(200, 8)
    (found,) = vectors.nearest(words, counts, rows, ["w7"], 5)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = {word: float(unit[7] @ unit[n]) for n, word in enumerate(words) if n != 7}
    best = sorted(cosines, key=lambda word: -cosines[word])[:5]
    assert found.word == "w7" and [word for word, _ in found.near] == best
    assert dict(found.near) == pytest.approx({word: cosines[word] for word in best}, abs=1e-5)


def test_rare_words_are_no_neighbours() -> None:
    words = [f"w{n}" for n in range(120)]
    counts = np.array([100] * 60 + [2] * 60)
    rows = np.tile(np.array([[1.0, 0.0]], np.float32), (120, 1))
    for asked in ("w3", "w100"):
        (found,) = vectors.nearest(words, counts, rows, [asked], 200)
        assert {word for word, _ in found.near} <= set(words[:60]) - {asked}


def test_rows_of_zeros_do_no_harm() -> None:
    (found,) = vectors.nearest(WORDS, COUNTS, np.zeros((4, 3), np.float32), ["the"], 2)
    assert [cosine for _, cosine in found.near] == [0.0, 0.0]


def test_words_to_look_at_are_known_ones_or_spread_over_the_frequent() -> None:
    plain = [f"word{n}" for n in range(3000)]
    counts = np.full(3000, 100)
    chosen = vectors.choose_words(plain, counts, 8)
    assert len(set(chosen)) == len(chosen) <= 8 and set(chosen) <= set(plain[60:2000])
    program = list(vectors.FAVOURITES) + plain
    assert vectors.choose_words(program, np.full(len(program), 100), 8) == list(
        vectors.FAVOURITES[:8]
    )
    assert set(vectors.choose_words(["a", "b"], np.array([9, 1]), 8)) <= {"a", "b"}
