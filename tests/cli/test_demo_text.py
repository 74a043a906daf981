"""Text into tokens: what is a word, what is read, what is refused; and word vectors as text."""

import sysconfig
import unittest
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.cli.demo import text

FOX = "the quick brown fox jumps over the lazy dog and the cat\n" * 4


def read(*paths: Path, min_count: int = 1, ranks: int = 1) -> text.Corpus:
    return text.read(paths, min_count=min_count, ranks=ranks)


def test_words_and_identifiers_are_tokens() -> None:
    assert text.tokenize("12 34 5") == []
    found = text.tokenize("a-b a'b self._read_2(x1) + 3.5e10 - 0xFF; naïve Größe 漢字 été")
    assert found == ["a", "b", "a", "b", "self", "_read_2", "x1", "naïve", "größe", "漢字", "été"]


def test_vocabulary_is_by_frequency_then_alphabet_without_rare_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b b b a a c c d " * 5 + "unique rarer rarer")
    found = read(tmp_path / "a.txt", min_count=3)
    assert found.words == ["b", "a", "c", "d"]
    assert found.counts.tolist() == [15, 10, 10, 5]
    assert found.tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 3] * 5
    assert found.about == ("1 files, 40 tokens, 4 words; 2 words rarer than 3 (3 tokens) left out")


def test_folders_are_read_whole_in_order_but_for_what_is_no_text(tmp_path: Path) -> None:
    for name, content in (
        ("a/deep.md", b"deep " * 20),
        ("b.txt", b"high " * 20),
        ("latin.txt", "caf\xe9 au lait ".encode("latin-1") * 20),
        ("z.bin", b"PK\0\1 third"),
        (".hidden", b"hidden"),
        ("__pycache__/x.py", b"cached"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = read(tmp_path)
    assert found.words == ["au", "caf", "deep", "high", "lait"]
    assert found.tokens[:20].tolist() == [3] * 20 and found.tokens[-20:].tolist() == [2] * 20
    assert found.about.startswith("3 files, ")
    assert found.about.endswith("; 1 files skipped, not text")


def test_the_default_is_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder of it: to read all takes seconds."""
    part = f"{Path(unittest.__file__).parent}"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": part})
    found = read(min_count=20)
    assert found.source == "the source of the Python standard library"
    assert len(found.tokens) > 20_000 and {"self", "assertequal"} <= set(found.words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1 2 3 !", "no words in"),
        (b"a\0b", "is not text: it holds zero bytes"),
        (b"some few words", "too little text in .* ranks need 24 tokens; .*--min-count"),
        (b"same " * 500, "too little text in .* tokens of 1 words"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(weft.WeftError, match=said):
        read(tmp_path / "x.txt", ranks=2)


def test_an_unreadable_file_is_refused_if_named_and_counted_if_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.txt").write_text(FOX)
    bad = tmp_path / "locked.txt"
    bad.write_text("secret")

    def read_bytes(path: Path) -> bytes:
        if path == bad:
            raise PermissionError(13, "Permission denied")
        return FOX.encode()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)  # root may read anything
    with pytest.raises(weft.WeftError, match=r"cannot read .*locked\.txt: Permission denied"):
        read(bad)
    assert "1 files skipped" in read(tmp_path).about


def corpus(words: list[str], counts) -> text.Corpus:
    counts = np.broadcast_to(counts, len(words)).astype(np.int64)
    return text.Corpus("x", "", words, counts, np.zeros(9, np.int32))


def test_the_format_of_vectors_is_word2vecs() -> None:
    lines = text.vector_lines(["a", "漢字"], np.array([[1, -0.5], [1e-9, 1234567]], np.float32))
    assert list(lines) == ["2 2\n", "a 1 -0.5\n", "漢字 1e-09 1.23457e+06\n"]


def test_nearest_words_by_cosine_are_none_of_the_rare() -> None:
    words = [f"w{n}" for n in range(200)]
    rows = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = text.nearest(corpus(words, [100] * 60 + [2] * 140), rows, ["w7", "w100"], 5)
    for asked, near in found.items():
        own = words.index(asked)
        cosines = {words[n]: float(unit[own] @ unit[n]) for n in range(60) if n != own}
        best = sorted(cosines, key=lambda word: -cosines[word])[:5]
        assert [word for word, _ in near] == best
        assert dict(near) == pytest.approx({word: cosines[word] for word in best}, abs=1e-5)
    zeros = text.nearest(corpus(words, 100), np.zeros((200, 8), np.float32), ["w3"], 2)
    assert [cosine for _, cosine in zeros["w3"]] == [0.0, 0.0]
