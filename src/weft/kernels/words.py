"""What the loops say to LLVM and Numba has no words for; importing this imports Numba."""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()

count_ones = types.ExternalFunction("llvm.ctpop.i64", types.int64(types.int64))
"""count_ones(word): how many bits of the word are set."""

give_way = types.ExternalFunction("sched_yield", types.int32())
"""give_way(): let other processes have the core, if there are any that want it."""

WORD = np.dtype([("bits", np.int64)])
"""An int64 that lies anywhere: what is in such a record is not taken to be aligned."""


@register_jitable
def lowest_one(word):
    """Which bit is the lowest that is set, of a word that is not 0; LLVM knows it by this form."""
    return count_ones(~word & (word - 1))


def _word(result, *given):
    """A word of such arguments; the decorated function builds its code."""

    def made(build):
        @functools.wraps(build)  # Numba reads its parameters, too
        def word(context, *arguments):
            def code(context, builder, signature, values):
                value = build(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*given), code

        return intrinsic(word)

    return made


@_word(types.voidptr, types.int64)
def at(builder, address):
    """at(address): the pointer, for `carray`."""
    return builder.inttoptr(address, _BYTES)


@_word(types.void, types.int64)
def prefetch(builder, address):
    """prefetch(address): the line of the cache there is needed soon; any address is allowed."""
    form = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], form)
    return builder.call(function, [builder.inttoptr(address, _BYTES), _I32(0), _I32(3), _I32(1)])


# Numbers that processes share.


@_word(types.int64, types.int64)
def load_shared(builder, address):
    """load_shared(address): the int64 there, which another process may store meanwhile.

    All such loads and stores, of all processes, happen in one order (sequentially consistent). An
    acquire load could pass the store before it, on Arm.
    """
    pointer = builder.inttoptr(address, _I64.as_pointer())
    return builder.load_atomic(pointer, "seq_cst", 8, typ=_I64)


@_word(types.void, types.int64, types.int64)
def store_shared(builder, address, number):
    """store_shared(address, number): store an int64 that other processes load by `load_shared`.

    Whatever was written before, in this process, is seen by who has loaded the number.
    """
    return builder.store_atomic(number, builder.inttoptr(address, _I64.as_pointer()), "seq_cst", 8)


# Half precision lies in memory as bits: int16 for float16, uint16 for bfloat16.


@intrinsic
def widen(context, number):
    """widen(number): the float32 of bits in half precision; any other number is itself."""

    def code(context, builder, signature, arguments):
        if number == types.int16:
            return builder.fpext(builder.bitcast(arguments[0], _F16), _F32)
        if number == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(arguments[0], _I32), _I32(16)), _F32)
        return arguments[0]

    return (types.float32 if number.bitwidth == 16 else number)(number), code


@intrinsic
def narrow(context, number, kind):
    """narrow(number, kind): the number as this kind, rounded to nearest even."""
    goal = kind.dtype

    def code(context, builder, signature, arguments):
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
