"""What the loops say to LLVM and Python has no words for; importing this imports Numba.

The loops work on addresses: plain integers in, nothing allocated, nothing refused. All their
integers are int64. What lies at an address is said by a *kind*, and what combines two numbers by an
*operation*, both as numbers (`KINDS`, `CODES`). They come as arguments of a loop, so Numba compiles
each loop once for all of them; `jit` makes an instance of it for the kinds and the operation that a
call needs, in which they are constants, and LLVM removes the choice.

Half precision widens to float32 or float64 when it is loaded; a float32 is rounded to nearest even
when it is stored in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

KINDS = {"f32": 0, "f64": 1, "f16": 2, "bf16": 3, "i32": 4, "i64": 5}
CODES = {"sum": 0, "min": 1, "max": 2}

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_STORED = {"f32": _F32, "f64": _F64, "f16": _F16, "bf16": _I16, "i32": _I32, "i64": _I64}
_STORED["u8"] = ir.IntType(8)  # of which bytes are loaded, by this name
_TYPES: dict[str, Any] = {"f32": types.float32, "f64": types.float64, "i64": types.int64}
"""What the loops compute with, and of which kinds it may be loaded and stored:"""
_KINDS_OF = {
    "f32": ("f32", "f16", "bf16"),
    "f64": ("f64", "f16", "bf16"),
    "i64": ("i32", "i64"),
}
_LINE = 64  # bytes of a line of the cache


def _word(typing: Callable[..., Any]) -> Any:
    """Add a word to the vocabulary; strings in its arguments are constants when it is typed."""
    return intrinsic(prefer_literal=True)(typing)


def _chosen(
    builder: Any, names: Sequence[str], codes: dict[str, int], code: Any, case: Callable[[str], Any]
) -> Any:
    """The result of `case(name)` for the name whose number is `code`; if there is one name, its."""
    if len(names) == 1:
        return case(names[0])
    end, other = (builder.append_basic_block(name) for name in ("end", "other"))
    switch, found = builder.switch(code, other), []
    for name in names:
        block = builder.append_basic_block(name)
        switch.add_case(_I64(codes[name]), block)
        builder.position_at_end(block)
        found.append((case(name), builder.block))
        builder.branch(end)
    builder.position_at_end(other)
    builder.unreachable()
    builder.position_at_end(end)
    if found[0][0] is None:
        return None
    result = builder.phi(found[0][0].type)
    for value, block in found:
        result.add_incoming(value, block)
    return result


def _kinds(type: str, kind: Any) -> tuple[Any, Sequence[str]]:
    """The type of an argument that says a kind, and which kinds it may be."""
    fixed = isinstance(kind, types.StringLiteral)
    return (kind, [kind.literal_value]) if fixed else (types.int64, _KINDS_OF[type])


def _pointer(builder: Any, kind: str, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, _STORED[kind].as_pointer()), [index])


@_word
def load(context: Any, kind: Any, address: Any, index: Any) -> Any:
    """load(kind, address, index): the integer at `address[index]`; `kind` may be a name, too."""
    return _load("i64", kind, ())


@_word
def load_as(context: Any, type: Any, kind: Any, address: Any, index: Any) -> Any:
    """load_as(type, kind, address, index): the number there as an "f32", "f64" or "i64"."""
    return _load(type.literal_value, kind, (type,))


def _load(type: str, kind: Any, before: tuple[Any, ...]) -> Any:
    kind_type, kinds = _kinds(type, kind)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, address, index = arguments[-3:]

        def one(stored: str) -> Any:
            number = builder.load(_pointer(builder, stored, address, index), align=1)
            if stored == "bf16":
                number = builder.bitcast(builder.shl(builder.zext(number, _I32), _I32(16)), _F32)
            elif stored == "f16":
                number = builder.fpext(number, _F32)
            if type == "i64":
                widen = builder.zext if stored == "u8" else builder.sext
                return number if stored == "i64" else widen(number, _I64)
            return number if type == "f32" or stored == "f64" else builder.fpext(number, _F64)

        return _chosen(builder, kinds, KINDS, kind, one)

    return _TYPES[type](*before, kind_type, types.int64, types.int64), code


@_word
def store(context: Any, kind: Any, address: Any, index: Any, number: Any) -> Any:
    """store(kind, address, index, number): `address[index] = number`, cut to its lowest bits."""
    return _store("i64", kind, ())


@_word
def store_as(context: Any, type: Any, kind: Any, address: Any, index: Any, number: Any) -> Any:
    """store_as(type, kind, address, index, number): of this type, rounded once to the kind.

    A float64 is stored as no other kind.
    """
    return _store(type.literal_value, kind, (type,))


def _store(type: str, kind: Any, before: tuple[Any, ...]) -> Any:
    kind_type, kinds = _kinds(type, kind)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, address, index, number = arguments[-4:]

        def one(stored: str) -> None:
            narrow = number
            if stored == "f16":
                narrow = builder.fptrunc(number, _F16)
            elif stored == "bf16":
                narrow = _to_bfloat16(builder, number)
            elif type == "i64" and stored != "i64":
                narrow = builder.trunc(number, _STORED[stored])
            builder.store(narrow, _pointer(builder, stored, address, index), align=1)

        _chosen(builder, ["f64"] if type == "f64" else kinds, KINDS, kind, one)
        return context.get_dummy_value()

    return types.void(*before, kind_type, types.int64, types.int64, _TYPES[type]), code


def _to_bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    nan = builder.fcmp_unordered("uno", number, number)  # rounding could turn it into infinity
    return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), _I16)


@_word
def apply(context: Any, op: Any, left: Any, right: Any) -> Any:
    """apply(op, left, right): the two combined, in their own type; integers can only be summed.

    min and max are those of IEEE 754-2019: NaN wins, and -0.0 is less than 0.0.
    """
    floating = isinstance(left, types.Float)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        op, a, b = arguments
        if not floating:
            return builder.add(a, b)
        return _chosen(builder, [*CODES], CODES, op, lambda name: _combined(builder, name, a, b))

    return left(types.int64, left, left), code


def _combined(builder: Any, name: str, a: Any, b: Any) -> Any:
    if name == "sum":
        return builder.fadd(a, b)
    full = f"llvm.{name}imum.{a.type.intrinsic_name}"
    form = ir.FunctionType(a.type, [a.type, a.type])
    function = builder.module.globals.get(full) or ir.Function(builder.module, form, full)
    return builder.call(function, [a, b])


@_word
def prefetch(context: Any, address: Any, size: Any) -> Any:
    """prefetch(address, size): so many bytes there are needed soon; any address is allowed."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, size = arguments
        pointer = ir.IntType(8).as_pointer()
        form = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, form, name)
        end = builder.add(address, size)
        with cgutils.for_range_slice(builder, address, end, _I64(_LINE), intp=_I64) as (line, _):
            builder.call(function, [builder.inttoptr(line, pointer), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@_word
def copy(context: Any, to: Any, source: Any, size: Any) -> Any:
    """copy(to, source, size): so many bytes, which do not overlap."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, size = arguments
        pointer = ir.IntType(8).as_pointer()
        ends = (builder.inttoptr(address, pointer) for address in (to, source))
        memcpy: Any = cgutils.raw_memcpy  # which has no types
        memcpy(builder, *ends, size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@_word
def load_shared(context: Any, address: Any) -> Any:
    """load_shared(address): the int64 there, which another process may store meanwhile.

    All such loads and stores, of all processes, happen in one order (sequentially consistent). An
    acquire load could pass the store before it, on Arm.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        try:
            return builder.load_atomic(pointer, "seq_cst", 8)
        except TypeError:  # a release of llvmlite whose pointers have no types
            return builder.load_atomic(pointer, "seq_cst", 8, typ=_I64)

    return types.int64(types.int64), code


@_word
def store_shared(context: Any, address: Any, number: Any) -> Any:
    """store_shared(address, number): store an int64 that other processes load by `load_shared`.

    Whatever was written before, in this process, is seen by who has loaded the number.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, number = arguments
        builder.store_atomic(number, builder.inttoptr(address, _I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@_word
def give_way(context: Any) -> Any:
    """give_way(): let other processes have the core, if there are any that want it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        form = ir.FunctionType(_I32, [])
        name = "sched_yield"
        function = builder.module.globals.get(name) or ir.Function(builder.module, form, name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), code


@_word
def count_ones(context: Any, word: Any) -> Any:
    """count_ones(word): how many bits of the word are set."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), code


@_word
def lowest_one(context: Any, word: Any) -> Any:
    """lowest_one(word): which bit is the lowest that is set, of a word that is not 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), code
