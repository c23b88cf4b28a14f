"""Intrinsics for tiles of accumulators in registers. With hundreds of scalar variables instead, Numba would need over a
second for type inference.

`ort_cuda_plugin.compiler.intrinsics` defines them for kernels, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core.errors import RequireLiteralValue
from numba.cuda.typing import signature

i32, i64 = ir.IntType(32), ir.IntType(64)
VECTOR = 16
"""Minimum columns of a register tile whose rows are LLVM vectors. Only tiles of the emulated device are that wide: with
scalars, Numba and LLVM would spend most of a kernel's compile time on them.
"""


def literal(ty: Any) -> int:
    """Return the value of a literal argument. After RequireLiteralValue, Numba calls again with literal types."""
    if not isinstance(ty, types.IntegerLiteral):
        raise RequireLiteralValue("the sizes of a register tile must be literal integers")
    return int(ty.literal_value)


def tile_functions(name: str, ty: types.Type, element: ir.Type) -> dict[str, Any]:
    """Return ``registers_*``, ``clear_*``, ``multiply_add_tile_*``, ``scale_tile_*``, ``store_tile_*`` and
    ``copy_chunk_*`` for one type, by name.
    """
    pointer = types.CPointer(ty)
    zero = 0.0 if name.startswith("f") else 0
    llvm = Strips(name, element)
    size = int(ty.bitwidth) // 8

    def multiply_add_one(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
        return builder.fma(a, b, total) if name.startswith("f") else builder.add(builder.mul(a, b), total)

    def element_address(builder: ir.IRBuilder, base: ir.Value, index: int) -> ir.Value:
        return builder.gep(base, [i64(index)])

    def registers(typingctx: Any, count: Any) -> Any:
        number = literal(count)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            array = cgutils.alloca_once(builder, ir.ArrayType(element, number))
            base = builder.bitcast(array, element.as_pointer())
            width = VECTOR if number >= VECTOR**2 else 1
            cleared = element(zero) if width == 1 else ir.Constant(llvm.vector(width), None)
            for index in range(0, number, width):
                builder.store(cleared, llvm.at(builder, base, i64(index), width), align=size)
            return base

        return signature(pointer, count), codegen

    def clear(typingctx: Any, c: Any, count: Any) -> Any:
        number = literal(count)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            for index in range(number):
                builder.store(element(zero), element_address(builder, args[0], index))
            return context.get_dummy_value()

        return signature(types.none, pointer, count), codegen

    def multiply_add(typingctx: Any, c: Any, a: Any, at_a: Any, b: Any, at_b: Any, rows: Any, columns: Any) -> Any:
        m, n = literal(rows), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            total, a_base, a_index, b_base, b_index, _, _ = args
            a_base, b_base = builder.gep(a_base, [a_index]), builder.gep(b_base, [b_index])
            left = [builder.load(element_address(builder, a_base, i)) for i in range(m)]
            if n >= VECTOR:
                row = builder.load(llvm.at(builder, b_base, i64(0), n), align=size)
                for i in range(m):
                    address = llvm.at(builder, total, i64(i * n), n)
                    one, sums = llvm.repeated(builder, left[i], n), builder.load(address, align=size)
                    builder.store(llvm.multiply_add(builder, one, row, sums, n), address, align=size)
                return context.get_dummy_value()
            right = [builder.load(element_address(builder, b_base, j)) for j in range(n)]
            for i in range(m):
                for j in range(n):
                    address = element_address(builder, total, i * n + j)
                    builder.store(multiply_add_one(builder, left[i], right[j], builder.load(address)), address)
            return context.get_dummy_value()

        return signature(types.none, pointer, pointer, types.int64, pointer, types.int64, rows, columns), codegen

    def scale(typingctx: Any, c: Any, factors: Any, at: Any, rows: Any, columns: Any) -> Any:
        """Multiply each element of row i of a tile by ``factors[at + i]``."""
        m, n = literal(rows), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            total, base = args[0], builder.gep(args[1], [args[2]])
            multiply = builder.fmul if name.startswith("f") else builder.mul
            for i in range(m):
                factor = builder.load(element_address(builder, base, i))
                for j in range(n):
                    address = element_address(builder, total, i * n + j)
                    builder.store(multiply(builder.load(address), factor), address)
            return context.get_dummy_value()

        return signature(types.none, pointer, pointer, types.int64, rows, columns), codegen

    functions = {"registers": registers, "clear": clear, "multiply_add_tile": multiply_add, "scale_tile": scale}
    return {f"{prefix}_{name}": function for prefix, function in functions.items()} | _tile_copies(name, ty, element)


def _tile_copies(name: str, ty: types.Type, element: ir.Type) -> dict[str, Any]:
    """Return ``store_tile_*`` and ``copy_chunk_*`` for one type."""
    pointer = types.CPointer(ty)
    llvm = Strips(name, element)
    size = int(ty.bitwidth) // 8

    def store(typingctx: Any, out: Any, at: Any, stride: Any, c: Any, rows: Any, columns: Any) -> Any:
        m, n, step = literal(rows), literal(columns), literal(stride)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            base = builder.gep(args[0], [args[1]])
            width = n if n >= VECTOR else 1
            for i in range(m):
                for j in range(0, n, width):
                    value = builder.load(llvm.at(builder, args[3], i64(i * n + j), width), align=size)
                    builder.store(value, llvm.at(builder, base, i64(i * step + j), width), align=size)
            return context.get_dummy_value()

        return signature(types.none, pointer, types.int64, stride, pointer, rows, columns), codegen

    def copy(typingctx: Any, out: Any, at: Any, stride: Any, source: Any, first: Any, count: Any) -> Any:
        """Copy ``count`` adjacent elements, from ``source[first]`` on, to ``out[at]``, ``out[at + stride]``, ..."""
        n, step = literal(count), literal(stride)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            row = builder.load(llvm.at(builder, args[3], args[4], n), align=size)
            if step == 1:
                builder.store(row, llvm.at(builder, args[0], args[1], n), align=size)
                return context.get_dummy_value()
            base = builder.gep(args[0], [args[1]])
            for index in range(n):
                builder.store(builder.extract_element(row, i32(index)), builder.gep(base, [i64(index * step)]))
            return context.get_dummy_value()

        return signature(types.none, pointer, types.int64, stride, pointer, types.int64, count), codegen

    return {f"store_tile_{name}": store, f"copy_chunk_{name}": copy}


@dataclass(frozen=True)
class Strips:
    """Emits LLVM code for strips: vectors of n elements of type ``element``, which memory holds as type ``storage``."""

    storage: str
    element: ir.Type

    def vector(self, n: int) -> ir.Type:
        return vector_type(self.element, n)

    @staticmethod
    def at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, n: int) -> ir.Value:
        """Return the address of the strip of n elements that begins at ``base[index]``."""
        address = builder.gep(base, [index])
        return builder.bitcast(address, vector_type(base.type.pointee, n).as_pointer())

    def widened(self, builder: ir.IRBuilder, x: ir.Value, n: int) -> ir.Value:
        """Convert a strip from its storage type to ``element``."""
        if self.storage == "f16" and n == 1:
            assembly = ir.InlineAsm(ir.FunctionType(self.element, [ir.IntType(16)]), "cvt.f32.f16 $0, $1;", "=f,h")
            return builder.call(assembly, [x])
        if self.storage == "f16":
            return builder.fpext(builder.bitcast(x, vector_type(ir.HalfType(), n)), self.vector(n))
        if self.storage == "bf16":
            shift = ir.Constant(vector_type(i32, n), 16 if n == 1 else [16] * n)
            return builder.bitcast(builder.shl(builder.zext(x, vector_type(i32, n)), shift), self.vector(n))
        return x

    def repeated(self, builder: ir.IRBuilder, x: ir.Value, n: int) -> ir.Value:
        """Return a strip with n copies of one element."""
        if n == 1:
            return x
        nothing = ir.Constant(self.vector(n), ir.Undefined)
        first = builder.insert_element(nothing, x, i32(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(vector_type(i32, n), [0] * n))

    def multiply_add(self, builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value, n: int) -> ir.Value:
        if not isinstance(self.element, (ir.FloatType, ir.DoubleType)):
            return builder.add(builder.mul(a, b), total)
        bits = "f32" if isinstance(self.element, ir.FloatType) else "f64"
        name = f"llvm.fma.{bits if n == 1 else f'v{n}{bits}'}"
        function_type = ir.FunctionType(self.vector(n), [self.vector(n)] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [a, b, total])


def vector_type(base: ir.Type, n: int) -> ir.Type:
    return base if n == 1 else ir.VectorType(base, n)


def strip_functions(storage: str, memory: types.Type, ty: types.Type, element: ir.Type) -> dict[str, Any]:
    """Return the intrinsics for strips, by name. A strip is a vector of n adjacent elements; on a GPU, n is 1.

    - ``strips_*(rows, n)`` returns accumulators of 0, a strip per row.
    - ``multiply_add_strip_*(sums, weights, at_w, x, at_x, rows, n)`` multiplies the strip of x at
      ``at_x`` by each of the ``rows`` weights from ``at_w`` (a multiple of ``rows``) on, and adds the products to the
      rows.
    - ``multiply_add_lanes_*(sums, row, x, at_x, y, at_y, n)`` adds the elementwise product of two strips to one row.
    - ``copy_strip_*(to, sums, row, n)`` copies one row, ``store_strips_*(to, at, sums, rows, n)`` stores all rows.

    Names end in the storage type of x. ``ty`` is the type of the accumulators ``sums`` and of the weights, ``element``
    the same type in LLVM.
    """
    pointer, source = types.CPointer(ty), types.CPointer(memory)
    llvm = Strips(storage, element)
    size, x_size = (int(t.bitwidth) // 8 for t in (ty, memory))

    def multiply_add(typingctx: Any, c: Any, a: Any, at_a: Any, b: Any, at_b: Any, rows: Any, columns: Any) -> Any:
        m, n = literal(rows), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            total, weights, first, x, place, _, _ = args
            right = llvm.widened(builder, builder.load(llvm.at(builder, x, place, n), align=x_size), n)
            base = builder.gep(weights, [first])
            for row in range(m):
                # ``at_w`` is a multiple of the number of weights, so that a GPU can load up to 16 bytes of weights at
                # once.
                aligned = math.gcd(m * size, row * size, 16)
                left = llvm.repeated(builder, builder.load(builder.gep(base, [i64(row)]), align=aligned), n)
                address = llvm.at(builder, total, i64(row * n), n)
                value = llvm.multiply_add(builder, left, right, builder.load(address, align=size), n)
                builder.store(value, address, align=size)
            return context.get_dummy_value()

        return signature(types.none, pointer, pointer, types.int64, source, types.int64, rows, columns), codegen

    def multiply_lanes(typingctx: Any, c: Any, row: Any, a: Any, at_a: Any, b: Any, at_b: Any, columns: Any) -> Any:
        number, n = literal(row), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            total, _, *places, _ = args
            a, b = (
                llvm.widened(builder, builder.load(llvm.at(builder, x, place, n), align=x_size), n)
                for x, place in (places[:2], places[2:])
            )
            address = llvm.at(builder, total, i64(number * n), n)
            value = llvm.multiply_add(builder, a, b, builder.load(address, align=size), n)
            builder.store(value, address, align=size)
            return context.get_dummy_value()

        return signature(types.none, pointer, row, source, types.int64, source, types.int64, columns), codegen

    functions: dict[str, Any] = {
        f"multiply_add_strip_{storage}": multiply_add,
        f"multiply_add_lanes_{storage}": multiply_lanes,
    }
    return functions | (_accumulator_functions(storage, ty, element) if memory == ty else {})


def _accumulator_functions(storage: str, ty: types.Type, element: ir.Type) -> dict[str, Any]:
    """Return those functions of `strip_functions` that create, copy and store accumulators."""
    pointer = types.CPointer(ty)
    llvm = Strips(storage, element)
    size = int(ty.bitwidth) // 8

    def strips(typingctx: Any, rows: Any, columns: Any) -> Any:
        m, n = literal(rows), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            array = cgutils.alloca_once(builder, ir.ArrayType(llvm.vector(n), m))
            base = builder.bitcast(array, element.as_pointer())
            for row in range(m):
                builder.store(ir.Constant(llvm.vector(n), None), llvm.at(builder, base, i64(row * n), n), align=size)
            return base

        return signature(pointer, rows, columns), codegen

    def copy(typingctx: Any, out: Any, c: Any, row: Any, columns: Any) -> Any:
        number, n = literal(row), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value = builder.load(llvm.at(builder, args[1], i64(number * n), n), align=size)
            builder.store(value, llvm.at(builder, args[0], i64(0), n), align=size)
            return context.get_dummy_value()

        return signature(types.none, pointer, pointer, row, columns), codegen

    def store(typingctx: Any, out: Any, at: Any, c: Any, rows: Any, columns: Any) -> Any:
        m, n = literal(rows), literal(columns)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            base = builder.gep(args[0], [args[1]])
            for row in range(m):
                value = builder.load(llvm.at(builder, args[2], i64(row * n), n), align=size)
                builder.store(value, llvm.at(builder, base, i64(row * n), n), align=size)
            return context.get_dummy_value()

        return signature(types.none, pointer, types.int64, pointer, rows, columns), codegen

    return {f"strips_{storage}": strips, f"copy_strip_{storage}": copy, f"store_strips_{storage}": store}
