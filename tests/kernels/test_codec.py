"""Sorted indices in few bits: they come back, and what is damaged is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels import codec, jit

DTYPES = [torch.int32, torch.int64]
assert jit.loops() is not None, jit.describe()


def check(indices):
    """What was written, in memory that held something else before; it is read back."""
    code = codec.index_code(indices)
    out = torch.full((code.most + 40,), 0xA5, dtype=torch.uint8)
    size = codec.encode(indices, code, out)
    assert size <= code.most
    assert out[size:].eq(0xA5).all()  # nothing is written behind it
    back = torch.full((len(indices) + 1,), -7, dtype=indices.dtype)
    assert codec.decode(out, int(indices[0]), int(indices[-1]), back[:-1])
    assert torch.equal(back[:-1], indices)
    assert back[-1] == -7
    return out[:size]


@st.composite
def lists(draw):
    """Lists of blocks, each with gaps of a size of its own."""
    pieces = draw(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 40)), max_size=5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = [1 + generator.integers(0, 2**bits, count) for count, bits in pieces]
    first = draw(st.integers(0, 2**40))
    return torch.from_numpy(first + np.cumsum(np.concatenate([[0], [3], *steps])))


@settings(max_examples=60)
@given(lists())
def test_lists_come_back(indices):
    check(indices)
    if len(indices) and indices[-1] - indices[0] < 2**31:
        check((indices - indices[0]).int())


def test_the_bytes_are_those_of_the_format():
    # gaps 3, 0, 2, 9 leave out 14: a width of 1 is best for a mean of 3.5
    written = check(torch.tensor([5, 9, 10, 13, 23])).numpy()
    widths, remainders, unary = written[:8], written[8:24], written[24:]
    assert widths.tolist() == [1, *[0] * 7]
    assert int.from_bytes(remainders, "little") == 0b1001  # the last gap's comes highest
    assert int.from_bytes(unary, "little") == 0b10000_10_1_10  # 4, 1, 0 and 1 zeros, each a one


def test_dense_lists_are_bitmaps():
    indices = torch.tensor([0, 1, 2, 4, 6, 7, 9])
    written = check(indices)
    assert written[:8].eq(0).all()  # no remainders: all that is left is a word of zeros
    assert written[8:16].eq(0).all()
    bitmap = sum(1 << (index - 1) for index in indices.tolist()[1:])
    assert int.from_bytes(written[16:].numpy(), "little") == bitmap
    assert len(check(torch.arange(64_001))) == 256 + 8 + 8000


@pytest.mark.parametrize("places", [11, 20, 100, 5000])
def test_it_takes_hardly_more_than_the_entropy(places):
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(5000 * places, (5000,), generator=generator).unique().int()
    share = len(indices) / (5000 * places)
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    bits = 8 * len(check(indices)) / len(indices)
    assert entropy < bits < entropy + 0.2


def test_whatever_the_gaps_it_is_bounded():
    """One gap that leaves out all that is left out: the worst for a width by the mean."""
    for beyond in (10**3, 10**5, 10**6, 2 * 10**6):
        indices = torch.cat([torch.arange(256), torch.tensor([255 + beyond])])
        bits = 8 * (len(check(indices)) - 16) / 256  # but for what fills up words
        assert bits < math.log2(beyond / 256) + 2.1 + 0.5


def test_too_far_apart():
    assert codec.index_code(torch.tensor([3, 3 + 2**52])) is None
    check(torch.tensor([3, 2 + 2**52]))
    check(torch.tensor([2**31 - 2, 2**31 - 1], dtype=torch.int32))
    check(torch.tensor([0, 2**31 - 1], dtype=torch.int32))


# What is damaged.


def encoded(indices):
    code = codec.index_code(indices)
    out = torch.zeros(code.most, dtype=torch.uint8)
    return out[: codec.encode(indices, code, out)].clone()


def decoded(packed, first, last, count, dtype=torch.int64):
    """The list, or None; what is around it is checked."""
    memory = torch.full((count + 2,), -7, dtype=dtype)
    fine = codec.decode(packed, first, last, memory[1:-1])
    assert memory[0] == memory[-1] == -7
    return memory[1:-1] if fine else None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_refused(dtype):
    indices = torch.arange(0, 6000, 3, dtype=dtype)
    packed, last = encoded(indices), int(indices[-1])
    assert torch.equal(decoded(packed, 0, last, 2000, dtype), indices)
    assert decoded(packed, 0, last - 1, 2000, dtype) is None  # beyond the last index
    assert decoded(packed, 2**31 - 100, 2**62, 2000, torch.int32) is None  # beyond an int32
    assert decoded(packed, -1, last, 2000, dtype) is None
    assert decoded(packed, 0, last, 2000 + 64 * len(packed), dtype) is None  # there are not so many
    for size in (0, 7, 8, 100, len(packed) - 8):  # and not all of it is there
        assert decoded(packed[:size], 0, last, 2000, dtype) is None
    wide = packed.clone()
    wide[0] = 53  # a width that no list has
    assert decoded(wide, 0, 2**62, 2000, dtype) is None
    assert decoded(torch.full_like(packed, 0), 0, last, 2000, dtype) is None
    wide[:8] = 52  # gaps of 2**52 and more, whose sum leaves an int64
    assert decoded(torch.cat([wide, wide]), 0, 2**62, 2000, dtype) is None


def test_a_list_that_changes_meanwhile_stays_in_its_memory():
    indices = torch.arange(2000)
    code = codec.index_code(indices)
    out = torch.full((code.most + 2**15,), 7, dtype=torch.uint8)
    indices *= 50
    with pytest.raises(ValueError):
        codec.encode(indices, code, out[: code.most])
    assert torch.all(out[code.most :] == 7)


def test_lists_too_short_to_have_gaps():
    packed = encoded(torch.arange(5))
    assert decoded(packed, 0, 9, 0) is None and decoded(packed, 0, 9, 1) is None


def test_without_machine_code_nothing_is_packed(monkeypatch):
    packed, last = encoded(torch.arange(0, 6000, 3)), 5997
    monkeypatch.setattr(jit, "loops", lambda: None)
    assert codec.index_code(torch.arange(0, 6000, 3)) is None
    assert decoded(packed, 0, last, 2000) is None
