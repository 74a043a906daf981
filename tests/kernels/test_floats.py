"""Floating-point numbers in fewer bytes: machine code writes the bytes of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels import floats
from weft.kernels.compile import compiler

KINDS = {"f32": np.uint32, "bf16": np.uint16}
GUARD = 4096  # bytes around memory which nobody may touch
SPECIAL = {  # float32; bfloat16 has their upper halves
    "zero": 0,
    "-zero": 1 << 31,
    "one": 0x3F800000,
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "quiet": 0x7FC00000,
    "payload": 0xFFA5_5A5A,
    "signalling": 0x7F810001,
    "denormal": 0x00010001,
    "-denormal": 0x807FFFFF,
    "largest": 0x7F7FFFFF,
    "smallest": 0x00800000,
}
BLOCKS = ["normal", "uniform", "bits", "wide", "lowest", "highest", "outlier", "whole", "six"]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for kind in KINDS:
        compiler.make(floats.floats_key(kind))
        assert compiler.made(floats.floats_key(kind))


def block(what, count, seed):
    """Numbers of one character, as the bits of float32."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 1 << 32, count, np.uint32)
    if what in SPECIAL:
        return np.full(count, SPECIAL[what], np.uint32)
    if what == "bits":
        return bits
    if what in ("lowest", "highest", "six"):  # exponents of some range, at an end or anywhere
        first = {"lowest": 0, "highest": 250}.get(what, seed % 251)
        exponents = generator.integers(first, first + 6, count, np.uint32)
        return bits & np.uint32(0x807FFFFF) | exponents << np.uint32(23)
    if what == "wide":
        numbers = generator.normal(size=count) * 2.0 ** generator.integers(-100, 100, count)
    elif what == "whole":
        numbers = generator.integers(-3, 4, count)
    elif what == "uniform":
        numbers = generator.random(count)
    else:
        numbers = generator.normal(size=count) * 2.0 ** (seed % 200 - 100)
    numbers = numbers.astype(np.float32)
    if what == "outlier" and count:
        numbers[seed % count] = np.inf
    return numbers.view(np.uint32)


def numbers_of(kind, bits):
    return bits if kind == "f32" else (bits >> 16).astype(np.uint16)


def guarded(size):
    """Memory among bytes that must stay as they are, and a look whether they did."""
    memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)

    def untouched():
        return bool((memory[:GUARD] == 0xA5).all() and (memory[GUARD + size :] == 0xA5).all())

    return memory[GUARD : GUARD + size], untouched


def by_definition(patch):
    patch.setattr(floats.compiler, "loops", lambda key: None)


def packed(kind, numbers):
    """What is written, which is read back and held against the numbers on the way."""
    raw = numbers.view(np.uint8)
    most = floats.most_bytes(kind, len(numbers))
    out, untouched = guarded(most)
    size = floats.pack_floats(kind, raw.data, out.data)
    assert untouched(), "it wrote beyond its room"
    assert size <= len(raw) + 8 * -(-len(numbers) // 1024)
    assert size <= most
    packed = out[:size].copy()
    read, _ = guarded(most)  # behind what was written lies something else
    read[:size] = packed
    back, unharmed = guarded(len(raw))
    assert floats.unpack_floats(kind, read.data, back.data) == size
    assert unharmed(), "it wrote beyond the numbers"
    assert np.array_equal(back, raw)
    return packed


def check(kind, numbers):
    by_machine = packed(kind, numbers)
    with pytest.MonkeyPatch.context() as patch:
        by_definition(patch)
        assert np.array_equal(by_machine, packed(kind, numbers))
    return by_machine


def a_piece():
    counts = st.one_of(st.sampled_from([1, 63, 1023, 1024, 1025, 2048]), st.integers(1, 3000))
    return st.tuples(st.sampled_from([*BLOCKS, *SPECIAL]), counts, st.integers(0, 2**20))


@settings(max_examples=80)
@given(st.sampled_from(list(KINDS)), st.lists(a_piece(), max_size=5), st.booleans(), st.data())
def test_whatever_is_packed_comes_back_bit_by_bit(kind, pieces, mixed, data):
    bits = np.concatenate([np.zeros(0, np.uint32), *(block(*each) for each in pieces)])
    if mixed:
        np.random.default_rng(data.draw(st.integers(0, 2**20))).shuffle(bits)
    check(kind, numbers_of(kind, bits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [*BLOCKS, *SPECIAL])
def test_blocks_of_one_character_come_back(kind, what):
    for seed in (0, 3, 250):
        check(kind, numbers_of(kind, block(what, 2 * 1024 + 17, seed)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_window_of_exponents_is_found(kind):
    """Among them the first and the last; where there are few numbers of another exponent."""
    for first in [*range(8), *range(120, 130), *range(244, 252)]:
        bits = block("six", 1024, 7) & np.uint32(0x807FFFFF)
        exponents = first + np.arange(1024) % 7  # the seventh is the other one
        bits |= (np.minimum(exponents, 255) << 23).astype(np.uint32)
        bits[5::100] = SPECIAL["one"]
        written = check(kind, numbers_of(kind, bits))
        assert written[0] == floats.CODED
        plain = 1024 * KINDS[kind]().itemsize
        assert len(written) <= plain - 1024 + 384 + 8 + 2 * 11  # 8 bits are 3, but for those


def test_the_bytes_are_those_that_are_told():
    """As the words at the head of the file say it: written by hand, for another program."""
    exponents = np.full(1024, 100)  # the first of those used most
    exponents[1::2] = 105
    exponents[17 * 6] = exponents[17 * 8] = 0  # the other one: of those that are looked at
    exponents[64] = 200  # one that has no code, as 64 is not looked at
    signs, fractions = np.arange(1024) % 2, np.arange(1024) * 5003 % (1 << 23)
    bits = (signs << 31 | exponents << 23 | fractions).astype(np.uint32)
    written = check("f32", bits)
    assert written[:8].tolist() == [1, 100, 0, 0, 0, 0, 0, 0]
    assert written[8:2056].view("<u2").tolist() == (bits & 0xFFFF).tolist()
    assert written[2056:3080].tolist() == (signs << 7 | fractions >> 16).tolist()
    codes = np.where(exponents == 0, 6, np.where(exponents == 200, 7, exponents - 100))
    for group in range(16):
        for bit in range(3):
            at = 3080 + 24 * group + 8 * bit
            word = int.from_bytes(written[at : at + 8].tobytes(), "little")
            there = codes[64 * group : 64 * group + 64] >> bit & 1
            assert word == sum(int(one) << place for place, one in enumerate(there))
    assert written[3080 + 384 :].tolist() == [200]


@pytest.mark.parametrize(("kind", "told"), [("f32", 27.4), ("bf16", 11.4)])
def test_normal_numbers_take_as_many_bits_as_is_told(kind, told):
    for scale in (1e-6, 1.0, 3.7e4):
        normal = np.random.default_rng(5).normal(scale=scale, size=1 << 18).astype(np.float32)
        numbers = numbers_of(kind, normal.view(np.uint32))
        bits = 8 * len(packed(kind, numbers)) / len(numbers)
        assert bits == pytest.approx(told, abs=0.15), scale
    counts = np.bincount(normal.view(np.uint32) >> 23 & 0xFF, minlength=256)
    seven = max(counts[first : first + 7].sum() for first in range(250)) / len(normal)
    assert seven > 0.97


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_zeros_takes_8_bytes(kind):
    assert len(check(kind, np.zeros(5 * 1024, KINDS[kind]))) == 5 * 8
    almost = np.zeros(1024, KINDS[kind])
    almost[-1] = 1  # a denormal, or half of one; its exponent is that of zero
    assert len(check(kind, almost)) > 1024
    negative = np.full(1024, 1 << 8 * almost.itemsize - 1, almost.dtype)
    assert len(check(kind, negative)) > 1024  # which are no zeros


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_not_get_smaller_is_written_as_it_is(kind):
    """Also if those that are looked at deceive: all others have no code, and there is no room."""
    size = KINDS[kind]().itemsize
    for bits in (block("bits", 1024, 1), deceptive()):
        numbers = numbers_of(kind, bits)
        written = check(kind, numbers)
        assert len(written) == 8 + 1024 * size and written[0] == floats.PLAIN
        assert np.array_equal(written[8:], numbers.view(np.uint8))


def deceptive():
    bits = (140 + np.arange(1024) % 97 << 23).astype(np.uint32)
    bits[:: floats.EVERY] = SPECIAL["one"]
    return bits


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_that_still_fits_is_coded(kind):
    """Numbers without a code, up to as many as spare nothing any more."""
    size = KINDS[kind]().itemsize
    free = [place for place in range(1024) if place % floats.EVERY]
    most = 1024 - 384  # what the codes spare
    for count, method in ((most, floats.CODED), (most + 1, floats.PLAIN)):
        bits = np.full(1024, SPECIAL["one"], np.uint32)
        bits[free[:count]] = SPECIAL["largest"]
        written = check(kind, numbers_of(kind, bits))
        assert (written[0], len(written)) == (method, 8 + 1024 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_of_those_looked_at_must_have_codes(kind):
    """Five eighths of 61: 39. Those of the other exponent count, and here that has one."""
    looked = range(0, 1024, floats.EVERY)
    assert len(looked) == 61
    for within, method in ((37, floats.PLAIN), (38, floats.CODED)):
        bits = np.full(1024, SPECIAL["one"], np.uint32)
        bits[looked[within:]] = (140 + 4 * np.arange(61 - within) << 23).astype(np.uint32)
        assert check(kind, numbers_of(kind, bits))[0] == method


@settings(max_examples=60)
@given(
    st.sampled_from(list(KINDS)),
    st.integers(0, 5000),
    st.integers(0, 2**20),
    st.sampled_from(["bits", "codes", "ones", "tampered"]),
)
def test_anything_else_makes_other_numbers_and_touches_nothing(kind, count, seed, how):
    """The same ones by machine code and by the definition, also of as many bytes."""
    generator = np.random.default_rng(seed)
    most = floats.most_bytes(kind, count)
    out, untouched = guarded(most)
    out[:] = generator.integers(0, 256, most, np.uint8)
    if how == "codes":  # blocks say that they are coded, wherever they begin
        out[:] = floats.CODED
    elif how == "ones":  # and that no number has a code: the longest that there can be
        out[:] = 0xFF
        for at in range(0, most, floats.most_bytes(kind, 1024) - (1024 if kind == "f32" else 2048)):
            out[at] = floats.CODED
    elif how == "tampered":
        numbers = numbers_of(kind, block("normal", count, seed))
        floats.pack_floats(kind, numbers.view(np.uint8).data, out.data)
        if most:
            out[generator.integers(0, most, 20)] ^= generator.integers(0, 256, 20, np.uint8)
    source = out.copy()
    numbers, unharmed = guarded(count * KINDS[kind]().itemsize)
    size = floats.unpack_floats(kind, out.data, numbers.data)
    assert untouched() and unharmed() and np.array_equal(out, source)
    assert 0 <= size <= most
    with pytest.MonkeyPatch.context() as patch:
        by_definition(patch)
        defined, _ = guarded(len(numbers))
        assert floats.unpack_floats(kind, source.data, defined.data) == size
    assert np.array_equal(numbers, defined)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_numbers_without_codes_stay_within_their_room(kind):
    """The most that can be read: each block coded, and each number's exponent written out."""
    most, size = floats.most_bytes(kind, 1024), KINDS[kind]().itemsize
    taken = 8 + (size - 1) * 1024 + 384 + 1024
    assert taken <= most
    whole, untouched = guarded(3 * most)
    whole[:] = 0xFF
    whole[[0, taken, 2 * taken]] = floats.CODED
    numbers, unharmed = guarded(3 * 1024 * size)
    assert floats.unpack_floats(kind, whole.data, numbers.data) == 3 * taken
    assert untouched() and unharmed()


def test_memory_need_not_be_aligned():
    """Messages lie at any byte of what is leased for several."""
    for kind in KINDS:
        numbers = numbers_of(kind, block("normal", 1500, 3)).view(np.uint8)
        for shift in (1, 2, 3):
            source = np.zeros(len(numbers) + 8, np.uint8)
            source[shift : shift + len(numbers)] = numbers
            out = np.zeros(floats.most_bytes(kind, 1500) + 8, np.uint8)[shift:]
            size = floats.pack_floats(kind, source[shift : shift + len(numbers)].data, out.data)
            assert np.array_equal(out[:size], packed(kind, numbers.view(KINDS[kind])))


def test_kinds_are_those_of_dtypes_that_can_be_packed():
    assert dict(floats.FLOATS) == {torch.float32: "f32", torch.bfloat16: "bf16"}
    for dtype, kind in floats.FLOATS.items():
        numbers = torch.randn(3000).to(dtype)
        raw = numbers.view(torch.uint8).numpy()
        out = np.zeros(floats.most_bytes(kind, 3000), np.uint8)
        size = floats.pack_floats(kind, raw.data, out.data)
        assert size < 0.92 * raw.nbytes
