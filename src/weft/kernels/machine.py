"""What the machine can do and Python has no words for: the vocabulary of the compiled loops.

The loops (`index_loops`, `value_loops`) work on addresses: plain integers in, nothing allocated,
nothing refused, so calling one costs well under a microsecond and any tensor will do, whatever
its dtype. A *kind* says what lies at an address ("f32", "bf16", "u8", ...); it is a constant of
the compiled loop. Half precision widens to float32 when it is loaded and is rounded to nearest
even when it is stored. Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

__all__ = [
    "KINDS",
    "MONOTONIC",
    "NOT_NOW",
    "SIZES",
    "apply",
    "clock_gettime",
    "combine_rows",
    "count_ones",
    "fence",
    "join_floats",
    "load",
    "lowest_one",
    "memcmp",
    "memcpy",
    "memset",
    "not_now",
    "part",
    "prefetch",
    "prefetch_row",
    "prefetch_to_write",
    "process_vm_readv",
    "recv",
    "sched_yield",
    "send",
    "split_floats",
    "store",
    "stream",
]

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

KINDS: dict[str, tuple[Any, Any]] = {  # what lies in memory, what the loop computes with
    "f32": (ir.FloatType(), types.float32),
    "f64": (ir.DoubleType(), types.float64),
    "f16": (ir.HalfType(), types.float32),
    "bf16": (_I16, types.float32),
    "i8": (ir.IntType(8), types.int8),
    "i16": (_I16, types.int16),
    "i32": (_I32, types.int32),
    "i64": (_I64, types.int64),
    "u8": (ir.IntType(8), types.uint8),
}


SIZES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1}
"""Bytes of one number of each kind."""


_LINE = 64  # bytes of a line of the cache

P = ParamSpec("P")
R = TypeVar("R")


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function a part of the loops that call it.

    Its name in machine code is of what it closes over, too: numba tells functions of one name apart
    by a count in each process, and loops that two processes compiled may come together in a third.
    """
    named(function, *(str(cell.cell_contents) for cell in function.__closure__ or ()))
    made: Callable[P, R] = register_jitable(function)
    return made


def named(function: Callable[..., Any], *key: str) -> None:
    """Give a function a name that none has which other arguments made."""
    function.__qualname__ = ".".join([function.__qualname__, *key])


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library; addresses are integers."""
    return types.ExternalFunction(name, result(*arguments))


recv = _function("recv", types.int64, types.int32, types.int64, types.int64, types.int32)
send = _function("send", types.int64, types.int32, types.int64, types.int64, types.int32)
memcmp = _function("memcmp", types.int32, types.int64, types.int64, types.int64)
memcpy = _function("memcpy", types.int64, types.int64, types.int64, types.int64)
memset = _function("memset", types.int64, types.int64, types.int32, types.int64)
process_vm_readv = _function(
    "process_vm_readv",
    types.int64,
    types.int32,
    *(types.int64, types.uint64, types.int64, types.uint64, types.uint64),
)
sched_yield = _function("sched_yield", types.int32)
clock_gettime = _function("clock_gettime", types.int32, types.int32, types.int64)
_errno = _function("__errno_location", types.int64)

NOT_NOW = 0x4040
"""Flags of `recv` and `send`: MSG_DONTWAIT and MSG_NOSIGNAL, as Linux has them."""

_AGAIN, _INTERRUPTED = 11, 4  # EAGAIN and EINTR, as Linux has them


@part
def not_now(otherwise: int) -> int:
    """Why the last `recv` or `send` failed: the number of its error, below 0.

    It is what is given instead if there was nothing, or no room, at that moment.
    """
    error = load("i32", _errno(), 0)
    return otherwise if error in (_AGAIN, _INTERRUPTED) else -int(error)


MONOTONIC = 1
"""The clock that only goes on, as Linux numbers them."""


def _word(typing: Callable[..., Any]) -> Any:
    """Add a word to the vocabulary; strings in its arguments are constants when it is typed."""
    return intrinsic(prefer_literal=True)(typing)


def _at(builder: Any, kind: str, address: Any, index: Any) -> Any:
    stored = KINDS[kind][0]
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])


@_word
def load(context: Any, kind: Any, address: Any, index: Any) -> Any:
    """load(kind, address, index): the number at `address[index]`."""
    name = kind.literal_value

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(_at(builder, name, *arguments[1:]), align=1)
        if name == "f16":
            return builder.fpext(number, ir.FloatType())
        if name == "bf16":
            wide = builder.shl(builder.zext(number, _I32), _I32(16))
            return builder.bitcast(wide, ir.FloatType())
        return number

    return KINDS[name][1](kind, types.int64, types.int64), code


@_word
def store(context: Any, kind: Any, address: Any, index: Any, number: Any) -> Any:
    """store(kind, address, index, number): `address[index] = number`, rounded to the kind."""
    name = kind.literal_value

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, address, index, number = arguments
        if name == "f16":
            number = builder.fptrunc(number, ir.HalfType())
        elif name == "bf16":
            number = _to_bfloat16(builder, number)
        builder.store(number, _at(builder, name, address, index), align=1)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, KINDS[name][1]), code


def _to_bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    nan = builder.fcmp_unordered("uno", number, number)  # rounding could turn it into infinity
    return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), _I16)


@_word
def apply(context: Any, op: Any, left: Any, right: Any) -> Any:
    """apply(op, left, right): the two combined, in their own type; integers wrap.

    min and max are those of IEEE 754-2019: NaN wins, and -0.0 is less than 0.0.
    """
    name = op.literal_value

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _applied(builder, name, left, *arguments[1:])

    return left(op, left, left), code


def _applied(builder: Any, name: str, kind: Any, a: Any, b: Any) -> Any:
    """Two numbers, or vectors of them, of a kind that loops compute with."""
    if name in ("min", "max") and isinstance(kind, types.Float):
        one = getattr(a.type, "element", a.type).intrinsic_name
        many = f"v{a.type.count}" if isinstance(a.type, ir.VectorType) else ""
        full = f"llvm.{name}imum.{many}{one}"
        form = ir.FunctionType(a.type, [a.type, a.type])
        function = builder.module.globals.get(full) or ir.Function(builder.module, form, full)
        return builder.call(function, [a, b])
    if name in ("min", "max"):
        compare = builder.icmp_signed if getattr(kind, "signed", True) else builder.icmp_unsigned
        return builder.select(compare("<" if name == "min" else ">", a, b), a, b)
    if isinstance(kind, types.Float):
        return builder.fadd(a, b) if name == "sum" else builder.fmul(a, b)
    words = {"sum": "add", "prod": "mul", "band": "and_", "bor": "or_", "bxor": "xor"}
    return getattr(builder, words[name])(a, b)


@_word
def combine_rows(
    context: Any, op: Any, kind: Any, to: Any, left: Any, right: Any, width: Any
) -> Any:
    """combine_rows(op, kind, to, left, right, width): `width` numbers at `left` and `right`.

    In blocks of 16, 4 and 1: all of a block are read before any is written, at `to`, so they are
    combined at once, and `to` may be one of the two. Where `op` is "first", they are those at
    `left`. Not for half precision.
    """
    name, stored = op.literal_value, KINDS[kind.literal_value]

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses, width = arguments[2:5], arguments[5]
        bytes_of, done = _I64(SIZES[kind.literal_value]), _I64(0)
        for size in (16, 4, 1):
            vector = ir.VectorType(stored[0], size).as_pointer()
            end = builder.and_(width, _I64(-size))
            with cgutils.for_range_slice(builder, done, end, _I64(size), intp=_I64) as (at, _):
                offset = builder.mul(at, bytes_of)
                to, a, b = (
                    builder.inttoptr(builder.add(address, offset), vector) for address in addresses
                )
                number = builder.load(a, align=1)
                if name != "first":
                    number = _applied(builder, name, stored[1], number, builder.load(b, align=1))
                builder.store(number, to, align=1)
            done = end
        return context.get_dummy_value()

    integer = types.int64
    return types.void(op, kind, integer, integer, integer, integer), code


@_word
def prefetch(context: Any, address: Any) -> Any:
    """prefetch(address): the cache line there will be read soon; any address is allowed."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetched(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


def _prefetched(builder: Any, address: Any, write: int = 0) -> None:
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [pointer, _I32(write), _I32(3), _I32(1)])


@_word
def prefetch_row(context: Any, row: Any, size: Any) -> Any:
    """prefetch_row(row, size): so many bytes there will be read or written soon."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetched_row(builder, arguments, write=0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@_word
def prefetch_to_write(context: Any, row: Any, size: Any) -> Any:
    """prefetch_to_write(row, size): so many bytes there will be written soon, by nobody else."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetched_row(builder, arguments, write=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _prefetched_row(builder: Any, arguments: Any, write: int) -> None:
    row, size = arguments
    end = builder.add(row, size)
    with cgutils.for_range_slice(builder, row, end, _I64(_LINE), intp=_I64) as (line, _):
        _prefetched(builder, line, write)


@_word
def stream(context: Any, to: Any, source: Any) -> Any:
    """stream(to, source): copy 32 bytes without reading the cache lines that they replace.

    `to` is a multiple of 32. Others may see them late, or never before a `fence`.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block = ir.VectorType(_I64, 4).as_pointer()
        to, source = (builder.inttoptr(address, block) for address in arguments)
        written = builder.store(builder.load(source, align=1), to, align=32)
        written.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@_word
def fence(context: Any) -> Any:
    """fence(): what was streamed is seen by whoever hears of it after this."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@_word
def count_ones(context: Any, word: Any) -> Any:
    """count_ones(word): how many bits of the int64 are set."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), code


@_word
def lowest_one(context: Any, word: Any) -> Any:
    """lowest_one(word): which bit is the lowest that is set, of an int64 that is not 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), code


_GROUP = 64  # numbers whose exponents are coded together: three words of as many bits


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, _GROUP)


def _all(kind: Any, number: int) -> Any:
    return ir.Constant(_vector(kind), [number] * _GROUP)


def _vector_at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, _vector(kind).as_pointer())


def _spread(builder: Any, number: Any) -> Any:
    """The lowest byte of a number, 64 times."""
    undefined = ir.Constant(_vector(_I8), ir.Undefined)
    first = builder.insert_element(undefined, builder.trunc(number, _I8), _I32(0))
    return builder.shuffle_vector(first, undefined, _all(_I32, 0))


def _plane(builder: Any, planes: Any, number: int) -> Any:
    """Where the word is that has this bit of each of 64 codes."""
    return builder.inttoptr(builder.add(planes, _I64(8 * number)), _I64.as_pointer())


_OTHER, _ESCAPED = 6, 7  # codes, see `floats`


@_word
def split_floats(
    context: Any, kind: Any, numbers: Any, low: Any, high: Any, planes: Any, base: Any, other: Any
) -> Any:
    """split_floats(kind, numbers, low, high, planes, base, other): 64 numbers (f32 or bf16).

    Writes the lower 16 bits of each f32 to `low`, each sign and the 7 bits below the exponent to
    `high`, and codes of exponents to `planes`: their lowest bits, then the others. Returns which
    numbers' exponents have no code, as bits.
    """
    name = kind.literal_value

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, numbers, low, high, planes, base, other = arguments
        if name == "f32":
            whole = builder.load(_vector_at(builder, numbers, _I32), align=1)
            lower = builder.trunc(whole, _vector(_I16))
            builder.store(lower, _vector_at(builder, low, _I16), align=1)
            upper = builder.trunc(builder.lshr(whole, _all(_I32, 16)), _vector(_I16))
        else:
            upper = builder.load(_vector_at(builder, numbers, _I16), align=1)
        exponent = builder.trunc(builder.lshr(upper, _all(_I16, 7)), _vector(_I8))
        fraction = builder.and_(builder.trunc(upper, _vector(_I8)), _all(_I8, 0x7F))
        sign = builder.trunc(builder.lshr(upper, _all(_I16, 8)), _vector(_I8))
        signed = builder.or_(fraction, builder.and_(sign, _all(_I8, 0x80)))
        builder.store(signed, _vector_at(builder, high, _I8), align=1)
        number = builder.sub(exponent, _spread(builder, base))
        is_other = builder.icmp_unsigned("==", exponent, _spread(builder, other))
        rest = builder.select(is_other, _all(_I8, _OTHER), _all(_I8, _ESCAPED))
        number = builder.select(builder.icmp_unsigned("<", number, _all(_I8, _OTHER)), number, rest)
        escaped = _I64(-1)
        for bit in range(3):
            some = builder.and_(number, _all(_I8, 1 << bit))
            word = builder.bitcast(builder.icmp_unsigned("!=", some, _all(_I8, 0)), _I64)
            builder.store(word, _plane(builder, planes, bit), align=1)
            escaped = builder.and_(escaped, word)
        return escaped

    integer = types.int64
    return types.int64(kind, *[integer] * 6), code


@_word
def join_floats(
    context: Any, kind: Any, low: Any, high: Any, planes: Any, base: Any, other: Any, numbers: Any
) -> Any:
    """join_floats(kind, low, high, planes, base, other, numbers): what `split_floats` took apart.

    Returns which exponents are not right, since they have no code.
    """
    name = kind.literal_value

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, low, high, planes, base, other, numbers = arguments
        number, escaped = _all(_I8, 0), _I64(-1)
        for bit in range(3):
            word = builder.load(_plane(builder, planes, bit), align=1)
            escaped = builder.and_(escaped, word)
            some = builder.bitcast(word, _vector(ir.IntType(1)))
            number = builder.or_(number, builder.select(some, _all(_I8, 1 << bit), _all(_I8, 0)))
        exponent = builder.select(
            builder.icmp_unsigned("==", number, _all(_I8, _OTHER)),
            _spread(builder, other),
            builder.add(number, _spread(builder, base)),
        )
        signed = builder.zext(builder.load(_vector_at(builder, high, _I8), align=1), _vector(_I16))
        sign = builder.shl(builder.and_(signed, _all(_I16, 0x80)), _all(_I16, 8))
        fraction = builder.and_(signed, _all(_I16, 0x7F))
        placed = builder.shl(builder.zext(exponent, _vector(_I16)), _all(_I16, 7))
        upper = builder.or_(builder.or_(sign, fraction), placed)
        if name == "f32":
            lower = builder.load(_vector_at(builder, low, _I16), align=1)
            shifted = builder.shl(builder.zext(upper, _vector(_I32)), _all(_I32, 16))
            whole = builder.or_(builder.zext(lower, _vector(_I32)), shifted)
            builder.store(whole, _vector_at(builder, numbers, _I32), align=1)
        else:
            builder.store(upper, _vector_at(builder, numbers, _I16), align=1)
        return escaped

    integer = types.int64
    return types.int64(kind, *[integer] * 6), code
