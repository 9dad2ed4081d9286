"""What the kernel writes for LLVM itself: vectors of 16 numbers in compiled code, and sums of minima in registers.

Loops over arrays become vectors only where the compiler can tell that nothing overlaps. Here nothing is left to it:
LLVM is given the vectors and splits them into what the processor has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
"""Numbers in a vector."""

ROWS = 8
"""Rows of a register tile: AVX-512, AVX2 and NEON hold 8 vectors of sums, and one of columns, in registers."""

_FLOAT64 = ir.VectorType(ir.DoubleType(), LANES)
_FIRST = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)


class _Lanes(types.Type):
    """`LANES` float64 numbers, one for each of as many matrices. The type lives in compiled code alone."""

    def __init__(self) -> None:
        super().__init__(name="lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOAT64)


_lanes = _Lanes()


def _splat(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """A vector whose every lane is `number`."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, ir.IntType(32)(0)), undefined, _FIRST)


def _operation(build: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    @intrinsic
    def operation(typingctx, x, y):
        return _lanes(x, y), lambda context, builder, signature, arguments: build(builder, *arguments)

    return operation


least = _operation(lambda builder, x, y: builder.select(builder.fcmp_ordered("<", x, y), x, y))
most = _operation(lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


def _overload(symbol: Callable, operation: Any) -> None:
    @overload(symbol)
    def lanewise(x, y):
        if x is _lanes and y is _lanes:
            return lambda x, y: operation(x, y)


for _symbol, _name in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _overload(_symbol, _operation(lambda builder, x, y, name=_name: getattr(builder, name)(x, y)))


@intrinsic
def magnitude(typingctx, x):
    """The absolute value of each lane."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_FLOAT64, [_FLOAT64])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fabs.v{LANES}f64"), arguments)

    return _lanes(x), generate


@intrinsic
def choose(typingctx, x, y, then, other):
    """Lane by lane, `then` where x >= y and `other` elsewhere, so where either is NaN."""

    def generate(context, builder, signature, arguments):
        x, y, then, other = arguments
        return builder.select(builder.fcmp_ordered(">=", x, y), then, other)

    return _lanes(x, y, then, other), generate


@intrinsic
def every(typingctx, number):
    """The number in every lane."""
    return _lanes(types.float64), lambda context, builder, signature, arguments: _splat(builder, arguments[0])


def _place(context: Any, builder: ir.IRBuilder, kind: Any, numbers: ir.Value, at: ir.Value) -> ir.Value:
    data = context.make_array(kind)(context, builder, numbers).data
    return builder.bitcast(builder.gep(data, [builder.mul(at, at.type(LANES))]), _FLOAT64.as_pointer())


@intrinsic
def get(typingctx, numbers, at):
    """The vector at ``numbers[LANES at:]``; `numbers` is float64, contiguous, one axis. Nothing checks bounds."""

    def generate(context, builder, signature, arguments):
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=8)

    return _lanes(numbers, at), generate


@intrinsic
def put(typingctx, numbers, at, x):
    """Store the vector at ``numbers[LANES at:]``, as :func:`get` finds it."""

    def generate(context, builder, signature, arguments):
        numbers, at, x = arguments
        builder.store(x, _place(context, builder, signature.args[0], numbers, at), align=8)
        return context.get_dummy_value()

    return types.void(numbers, at, x), generate


@intrinsic
def tile(typingctx, panels, rows, columns, sums):
    """``sums[8 rows + r, 16 columns + c] = sum_k min(row r, row c)`` for one tile of pairs, in registers.

    LLVM is given vectors of 16 unsigned integers and splits them into what the processor has. `panels` is as `_fill`
    leaves it; `rows` counts blocks of 8 rows, `columns` blocks of 16.
    """
    signature = types.void(panels, rows, columns, sums)

    def generate(context, builder, signature, arguments):
        panels_type, _, _, sums_type = signature.args
        P = context.make_array(panels_type)(context, builder, arguments[0])
        S = context.make_array(sums_type)(context, builder, arguments[3])
        _, length, _ = cgutils.unpack_tuple(builder, P.shape)
        _, stride = cgutils.unpack_tuple(builder, S.shape)
        word = context.get_value_type(panels_type.dtype)
        index = length.type
        vector = ir.VectorType(word, LANES)
        minimum = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector, vector]), f"llvm.umin.v{LANES}i{word.width}"
        )
        const = lambda value: ir.Constant(index, value)  # noqa: E731
        zeros = ir.Constant(vector, [0] * LANES)
        rows, columns = arguments[1], arguments[2]
        size = builder.mul(length, const(LANES))
        half = builder.mul(builder.and_(rows, const(1)), const(ROWS))
        first = builder.add(builder.mul(builder.lshr(rows, const(1)), size), half)
        second = builder.mul(columns, size)

        before = builder.block
        loop, after = builder.append_basic_block("tile"), builder.append_basic_block("tile.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(index)
        k.add_incoming(const(0), before)
        totals = [builder.phi(vector) for _ in range(ROWS)]
        step = builder.mul(k, const(LANES))
        right = builder.bitcast(builder.gep(P.data, [builder.add(second, step)]), vector.as_pointer())
        right = builder.load(right, align=word.width // 8)
        grown = []
        for r, total in enumerate(totals):
            left = builder.load(builder.gep(P.data, [builder.add(builder.add(first, step), const(r))]))
            left = _splat(builder, left)
            grown.append(builder.add(total, builder.call(minimum, [left, right])))
            total.add_incoming(zeros, before)
            total.add_incoming(grown[-1], loop)
        following = builder.add(k, const(1))
        k.add_incoming(following, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, length), loop, after)
        builder.position_at_end(after)
        for r, total in enumerate(grown):
            row = builder.add(builder.mul(rows, const(ROWS)), const(r))
            at = builder.add(builder.mul(row, stride), builder.mul(columns, const(LANES)))
            at = builder.bitcast(builder.gep(S.data, [at]), vector.as_pointer())
            builder.store(total, at, align=word.width // 8)
        return context.get_dummy_value()

    return signature, generate
