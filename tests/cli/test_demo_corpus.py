"""Text into tokens: what is a word, what is read, what is refused, and what is said about it."""

import os
from pathlib import Path

import numpy as np
import pytest

from weft.cli.demo import corpus
from weft.cli.demo.settings import Refused

FOX = "the quick brown fox jumps over the lazy dog and the cat\n" * 4


def read(*paths: Path, min_count: int = 1, ranks: int = 1) -> corpus.Corpus:
    return corpus.read(paths, min_count=min_count, ranks=ranks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("Hello, World!", ["hello", "world"]),
        ("self._read_2(x1) + 3.5e10 - 0xFF", ["self", "_read_2", "x1"]),
        ("naïve Größe 漢字 été", ["naïve", "größe", "漢字", "été"]),
        ("a-b a.b a'b", ["a", "b", "a", "b", "a", "b"]),
        ("12 34 5", []),
    ],
)
def test_words_and_identifiers_are_tokens(text: str, words: list[str]) -> None:
    assert corpus.tokenize(text) == words


def test_vocabulary_is_by_frequency_then_alphabet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b b b a a c c d " * 5)
    found = read(tmp_path / "a.txt")
    assert found.words == ["b", "a", "c", "d"]
    assert found.counts.tolist() == [15, 10, 10, 5]
    assert found.tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 3] * 5


def test_rare_words_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(FOX + "unique rarer rarer")
    found = read(tmp_path / "a.txt", min_count=3)
    assert "unique" not in found.words and "rarer" not in found.words
    assert (found.rare_words, found.rare_tokens) == (2, 3)
    assert len(found.tokens) == found.counts.sum() == 12 * 4


def test_folders_are_read_whole_in_order_but_for_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second " * 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "deep.md").write_text("first " * 20)
    (tmp_path / "z.bin").write_bytes(b"PK\0\1 third")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("cached")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = read(tmp_path)
    assert found.words == ["first", "second"]
    assert found.tokens.tolist() == [0] * 20 + [1] * 20
    assert (found.files, found.skipped) == (2, 1)


def test_bytes_that_are_no_utf8_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait ".encode("latin-1") * 10)
    assert {"caf", "au", "lait"} <= set(read(tmp_path / "latin.txt").words)


def test_the_default_is_the_standard_library() -> None:
    some = [path for path, named in corpus._files(()) if not named]
    names = {path.name for path in some}
    assert {"argparse.py", "typing.py"} <= names and all(p.suffix == ".py" for p in some)
    assert not any("site-packages" in path.parts for path in some)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p / "nowhere", "no such file or folder: .*nowhere"),
        (lambda p: _file(p, b""), r"no words in .*x\.txt \(1 files read, 0 skipped\)"),
        (lambda p: _file(p, b"1 2 3 !"), "no words in"),
        (lambda p: _file(p, b"a\0b"), "is not text: it holds zero bytes"),
        (lambda p: _file(p, b"some few words"), "too little text in .*--min-count"),
        (lambda p: _file(p, b"same " * 500), "too little text in .* tokens of 1 words"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, make, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        read(make(tmp_path), ranks=2)
    assert "\n" not in str(refused.value)


def test_an_unreadable_file_is_refused_if_named_and_counted_if_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.txt").write_text(FOX)
    bad = tmp_path / "locked.txt"
    bad.write_text("secret")
    plain = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == bad:
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)  # root may read anything
    with pytest.raises(Refused, match=r"cannot read .*locked\.txt: Permission denied"):
        read(bad)
    assert read(tmp_path).skipped == 1


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "empty")
    with pytest.raises(Refused, match=r"no words in .*empty \(0 files read, 0 skipped\)"):
        read(tmp_path / "empty")


def test_frequent_words_are_thinned_out_and_rare_ones_stay() -> None:
    counts = np.array([900_000, 90_000, 10], dtype=np.int64)
    chance = corpus.keep_probability(counts, 1e-4)
    ratio = 1e-4 * counts.sum() / counts
    assert chance[0] == pytest.approx(np.sqrt(ratio[0]) + ratio[0]) and chance[0] < 0.02
    assert chance[0] < chance[1] < chance[2] == 1.0


def test_thinning_is_seeded_and_leaves_short_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("common " * 3000 + FOX * 20)
    found = read(tmp_path / "a.txt")
    one, two = (corpus.subsample(found, seed=5, at_least=10) for _ in range(2))
    assert 10 < len(one) < len(found.tokens) and np.array_equal(one, two)
    assert not np.array_equal(one, corpus.subsample(found, seed=6, at_least=10))
    whole = corpus.subsample(found, seed=5, at_least=len(found.tokens))
    assert np.array_equal(whole, found.tokens)


def test_random_words_come_by_count_to_the_three_quarters() -> None:
    counts = np.array([10_000, 625, 16, 1], dtype=np.int64)
    table = corpus.negative_table(counts, size=1 << 16)
    share = np.bincount(table, minlength=4) / len(table)
    wanted = counts**0.75 / (counts**0.75).sum()
    assert share == pytest.approx(wanted, abs=2e-5)


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "x.txt"
    path.write_bytes(content)
    return path
