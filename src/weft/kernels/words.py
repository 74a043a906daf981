"""What the loops say to LLVM and Numba has no words for; importing this imports Numba."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
_LONGS = _I64.as_pointer()


def _word(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """A word of such arguments; the decorated function builds its code."""

    def made(build: Callable[..., Any]) -> Any:
        @functools.wraps(build)  # Numba reads its parameters, too
        def word(context: Any, *arguments: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = build(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*given), code

        return intrinsic(word)

    return made


@_word(types.voidptr, types.int64)
def at(builder: Any, address: Any) -> Any:
    """at(address): the pointer, for `carray`."""
    return builder.inttoptr(address, _BYTES)


@_word(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> Any:
    """prefetch(address): the line of the cache there is needed soon; any address is allowed."""
    form = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    function = _function(builder, "llvm.prefetch.p0", form)
    return builder.call(function, [builder.inttoptr(address, _BYTES), _I32(0), _I32(3), _I32(1)])


@_word(types.int64, types.int64)
def count_ones(builder: Any, word: Any) -> Any:
    """count_ones(word): how many bits of the word are set."""
    return builder.ctpop(word)


@_word(types.int64, types.int64)
def lowest_one(builder: Any, word: Any) -> Any:
    """lowest_one(word): which bit is the lowest that is set, of a word that is not 0."""
    return builder.cttz(word, ir.IntType(1)(1))


# Words of 64 bits that lie anywhere, and those that processes share.


@_word(types.int64, types.int64)
def load_word(builder: Any, address: Any) -> Any:
    """load_word(address): the int64 there, which need not be aligned."""
    return builder.load(builder.inttoptr(address, _LONGS), align=1)


@_word(types.void, types.int64, types.int64)
def store_word(builder: Any, address: Any, number: Any) -> Any:
    """store_word(address, number): store an int64, which need not be aligned."""
    return builder.store(number, builder.inttoptr(address, _LONGS), align=1)


@_word(types.int64, types.int64)
def load_shared(builder: Any, address: Any) -> Any:
    """load_shared(address): the int64 there, which another process may store meanwhile.

    All such loads and stores, of all processes, happen in one order (sequentially consistent). An
    acquire load could pass the store before it, on Arm.
    """
    pointer = builder.inttoptr(address, _LONGS)
    try:
        return builder.load_atomic(pointer, "seq_cst", 8)
    except TypeError:  # a release of llvmlite whose pointers have no types
        return builder.load_atomic(pointer, "seq_cst", 8, typ=_I64)


@_word(types.void, types.int64, types.int64)
def store_shared(builder: Any, address: Any, number: Any) -> Any:
    """store_shared(address, number): store an int64 that other processes load by `load_shared`.

    Whatever was written before, in this process, is seen by who has loaded the number.
    """
    return builder.store_atomic(number, builder.inttoptr(address, _LONGS), "seq_cst", 8)


@_word(types.void)
def give_way(builder: Any) -> Any:
    """give_way(): let other processes have the core, if there are any that want it."""
    return builder.call(_function(builder, "sched_yield", ir.FunctionType(_I32, [])), [])


def _function(builder: Any, name: str, form: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, form, name)


# Half precision lies in memory as bits: int16 for float16, uint16 for bfloat16.


@intrinsic
def widen(context: Any, number: Any) -> Any:
    """widen(number): the float32 of bits in half precision; any other number is itself."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if number == types.int16:
            return builder.fpext(builder.bitcast(arguments[0], _F16), _F32)
        if number == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(arguments[0], _I32), _I32(16)), _F32)
        return arguments[0]

    return (types.float32 if number.bitwidth == 16 else number)(number), code


@intrinsic
def narrow(context: Any, number: Any, kind: Any) -> Any:
    """narrow(number, kind): the number as this kind, rounded to nearest even."""
    goal = kind.dtype

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if goal == types.int16:
            return builder.bitcast(builder.fptrunc(value, _F16), _I16)
        if goal == types.uint16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
            nan = builder.fcmp_unordered("uno", value, value)  # rounding may make it infinity
            return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), _I16)
        return context.cast(builder, value, number, goal)

    return goal(number, kind), code
