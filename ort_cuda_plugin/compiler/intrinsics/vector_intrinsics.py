"""Intrinsics for vector loads and stores: one access of up to 16 bytes for several adjacent elements.

The *lanes* of a thread are an array that LLVM keeps in registers, because all indices are constants after loops over
lanes are unrolled. A thread has ``count`` vectors of ``width`` elements each. The first begins at `first_element`, the
next ones `vector_step` elements later, so that the accesses of a block coalesce. If ``whole`` is true, which callers
compute by `whole_vectors` and `is_aligned`, a vector is one access. Otherwise elements are accessed one by one: for an
index above ``last``, the element ``last`` is read instead, and elements from index ``end`` on are not written. The
emulated device runs the same IR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.typing import signature

from ort_cuda_plugin.compiler.intrinsics.tile_intrinsics import literal

Function = Callable[..., Any]
i32, i64 = ir.IntType(32), ir.IntType(64)
_bytes = {"float": 4, "double": 8}


def _element_bytes(ty: ir.Type) -> int:
    return _bytes.get(str(ty)) or int(ty.width) // 8


def _special(builder: ir.IRBuilder, name: str) -> ir.Value:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(i32, []), f"llvm.nvvm.read.ptx.sreg.{name}"
    )
    return builder.zext(builder.call(function, []), i64)


def first_element(typingctx: Any, width: Any, count: Any) -> Any:
    """Return the index of the first element of the thread's first vector, int64. The grid is one-dimensional."""
    size, number = literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        block, threads, thread = (_special(builder, name) for name in ("ctaid.x", "ntid.x", "tid.x"))
        before = builder.mul(builder.mul(block, threads), i64(number))
        return builder.mul(builder.add(before, thread), i64(size))

    return signature(types.int64, width, count), codegen


def vector_step(typingctx: Any, width: Any) -> Any:
    """Return the distance between two successive vectors of a thread, in elements, int64."""
    size = literal(width)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.mul(_special(builder, "ntid.x"), i64(size))

    return signature(types.int64, width), codegen


def whole_vectors(typingctx: Any, at: Any, step: Any, n: Any, width: Any, count: Any) -> Any:
    """Return whether all of the thread's vectors end at or before index ``n``."""
    size, number = literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        last = builder.add(args[0], builder.mul(args[1], i64(number - 1)))
        return builder.icmp_signed("<=", builder.add(last, i64(size)), args[2])

    return signature(types.boolean, types.int64, types.int64, types.int64, width, count), codegen


def is_aligned(typingctx: Any, pointer: Any, width: Any) -> Any:
    """Return whether a pointer is aligned to the size of a vector of ``width`` elements."""
    size = literal(width)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        mask = size * _element_bytes(args[0].type.pointee) - 1
        return builder.icmp_signed("==", builder.and_(builder.ptrtoint(args[0], i64), i64(mask)), i64(0))

    return signature(types.boolean, pointer, width), codegen


def lanes_of(typingctx: Any, pointer: Any, count: Any) -> Any:
    """Return an array of ``count`` uninitialized lanes of the type that ``pointer`` points to."""
    number = literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        element = args[0].type.pointee
        array = cgutils.alloca_once(builder, ir.ArrayType(element, number))
        return builder.bitcast(array, element.as_pointer())

    return signature(pointer, pointer, count), codegen


def _vector(builder: ir.IRBuilder, pointer: ir.Value, at: ir.Value, width: int) -> tuple[ir.Value, int]:
    """Return (address of a vector, number of elements per item of the loaded LLVM vector).

    Elements of less than 32 bits are accessed as 32-bit items, since PTX has no vectors of eight elements. Shifts
    unpack an item, so that LLVM does not turn it into accesses of narrow elements.
    """
    element = pointer.type.pointee
    size = _element_bytes(element)
    packed = 4 // size if size < 4 <= size * width else 1
    item = i32 if packed > 1 else element
    return builder.bitcast(builder.gep(pointer, [at]), ir.VectorType(item, width // packed).as_pointer()), packed


def _load_items(builder: ir.IRBuilder, pointer: ir.Value, at: ir.Value, width: int) -> tuple[list[ir.Value], int]:
    """Load a vector; return (its items, number of elements in each item)."""
    address, packed = _vector(builder, pointer, at, width)
    loaded = builder.load(address, align=width * _element_bytes(pointer.type.pointee))
    return [builder.extract_element(loaded, i32(i)) for i in range(width // packed)], packed


def _load_vector(builder: ir.IRBuilder, pointer: ir.Value, at: ir.Value, width: int) -> list[ir.Value]:
    return _elements(builder, *_load_items(builder, pointer, at, width), pointer.type.pointee)


def _elements(builder: ir.IRBuilder, items: list[ir.Value], packed: int, element: ir.Type) -> list[ir.Value]:
    if packed == 1:
        return items
    return [
        builder.trunc(builder.lshr(item, i32(part * (32 // packed))) if part else item, element)
        for item in items
        for part in range(packed)
    ]


def _store_vector(builder: ir.IRBuilder, pointer: ir.Value, at: ir.Value, values: Sequence[ir.Value]) -> None:
    address, packed = _vector(builder, pointer, at, len(values))
    vector = ir.Constant(address.type.pointee, ir.Undefined)
    for number in range(len(values) // packed):
        item = values[number * packed]
        if packed > 1:
            item = builder.zext(item, i32)
            for part in range(1, packed):
                wide = builder.zext(values[number * packed + part], i32)
                item = builder.or_(item, builder.shl(wide, i32(part * (32 // packed))))
        vector = builder.insert_element(vector, item, i32(number))
    builder.store(vector, address, align=len(values) * _element_bytes(pointer.type.pointee))


def _places(builder: ir.IRBuilder, at: ir.Value, step: ir.Value, count: int) -> Iterator[ir.Value]:
    for number in range(count):
        yield at
        at = builder.add(at, step) if number + 1 < count else at


def load_lanes(
    typingctx: Any,
    lanes: Any,
    first: Any,
    pointer: Any,
    at: Any,
    step: Any,
    last: Any,
    whole: Any,
    width: Any,
    count: Any,
) -> Any:
    """Load ``count`` vectors into the lanes from lane ``first`` on."""
    start, size, number = literal(first), literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        target, _, source, place, distance, limit, is_whole = args[:7]

        def keep(lane: int, value: ir.Value) -> None:
            builder.store(value, builder.gep(target, [i64(start + lane)]))

        with builder.if_else(is_whole, likely=True) as (then, otherwise):
            with then:
                for vector, where in enumerate(_places(builder, place, distance, number)):
                    for i, value in enumerate(_load_vector(builder, source, where, size)):
                        keep(vector * size + i, value)
            with otherwise:
                for vector, where in enumerate(_places(builder, place, distance, number)):
                    base, left = builder.gep(source, [where]), builder.trunc(builder.sub(limit, where), i32)
                    for i in range(size):
                        index = builder.select(builder.icmp_signed("<", i32(i), left), i32(i), left)
                        keep(vector * size + i, builder.load(builder.gep(base, [builder.sext(index, i64)])))
        return context.get_dummy_value()

    known = (types.int64, types.int64, types.int64, types.boolean)
    return signature(types.none, lanes, first, pointer, *known, width, count), codegen


def load_lanes_inside(typingctx: Any, lanes: Any, first: Any, pointer: Any, at: Any, inside: Any, width: Any) -> Any:
    """Load an aligned vector into the lanes from lane ``first`` on if ``inside`` is true, else write zeros to them."""
    start, size = literal(first), literal(width)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        target, _, source, place, is_inside = args[:5]
        element = source.type.pointee
        before = builder.block
        with builder.if_then(is_inside, likely=True):
            items, packed = _load_items(builder, source, place, size)
            loading = builder.block
        # Select zeros before unpacking, since there are fewer items than elements.
        merged = []
        for item in items:
            merged.append(builder.phi(item.type))
            merged[-1].add_incoming(ir.Constant(item.type, 0), before)
            merged[-1].add_incoming(item, loading)
        for lane, value in enumerate(_elements(builder, merged, packed, element)):
            builder.store(value, builder.gep(target, [i64(start + lane)]))
        return context.get_dummy_value()

    return signature(types.none, lanes, first, pointer, types.int64, types.boolean, width), codegen


def store_lanes(
    typingctx: Any,
    lanes: Any,
    first: Any,
    pointer: Any,
    at: Any,
    step: Any,
    end: Any,
    whole: Any,
    width: Any,
    count: Any,
) -> Any:
    """Store ``count`` vectors from the lanes from lane ``first`` on."""
    start, size, number = literal(first), literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, _, target, place, distance, limit, is_whole = args[:7]
        values = [builder.load(builder.gep(source, [i64(start + i)])) for i in range(size * number)]
        with builder.if_else(is_whole, likely=True) as (then, otherwise):
            with then:
                for vector, where in enumerate(_places(builder, place, distance, number)):
                    _store_vector(builder, target, where, values[vector * size : (vector + 1) * size])
            with otherwise:
                for vector, where in enumerate(_places(builder, place, distance, number)):
                    base, left = builder.gep(target, [where]), builder.trunc(builder.sub(limit, where), i32)
                    for i in range(size):
                        with builder.if_then(builder.icmp_signed("<", i32(i), left)):
                            builder.store(values[vector * size + i], builder.gep(base, [i64(i)]))
        return context.get_dummy_value()

    known = (types.int64, types.int64, types.int64, types.boolean)
    return signature(types.none, lanes, first, pointer, *known, width, count), codegen


def _is_vector(builder: ir.IRBuilder, pointer: ir.Value, at: ir.Value, end: ir.Value, size: int) -> ir.Value:
    """Return whether the vector at index ``at`` is aligned, and ends at or before index ``end``."""
    address = builder.ptrtoint(builder.gep(pointer, [at]), i64)
    mask = size * _element_bytes(pointer.type.pointee) - 1
    aligned = builder.icmp_signed("==", builder.and_(address, i64(mask)), i64(0))
    return builder.and_(aligned, builder.icmp_signed("<=", builder.add(at, i64(size)), end))


def load_row(typingctx: Any, lanes: Any, pointer: Any, at: Any, step: Any, end: Any, width: Any, count: Any) -> Any:
    """Load the thread's vectors of a row that ends before index ``end``; lanes beyond the end do not change."""
    size, number = literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        target, source, place, distance, limit = args[:5]
        for vector, where in enumerate(_places(builder, place, distance, number)):
            keep = [builder.gep(target, [i64(vector * size + i)]) for i in range(size)]
            with builder.if_else(_is_vector(builder, source, where, limit, size), likely=True) as (then, otherwise):
                with then:
                    for address, value in zip(keep, _load_vector(builder, source, where, size), strict=True):
                        builder.store(value, address)
                with otherwise:
                    base, left = builder.gep(source, [where]), builder.trunc(builder.sub(limit, where), i32)
                    for i, address in enumerate(keep):
                        with builder.if_then(builder.icmp_signed("<", i32(i), left)):
                            builder.store(builder.load(builder.gep(base, [i64(i)])), address)
        return context.get_dummy_value()

    return signature(types.none, lanes, pointer, types.int64, types.int64, types.int64, width, count), codegen


def load_around(typingctx: Any, lanes: Any, pointer: Any, at: Any, begin: Any, end: Any, width: Any, reach: Any) -> Any:
    """Load the vector at index ``at``, and ``reach`` vectors before and after it; elements outside ``begin``..``end``
    become 0.

    Each vector is either wholly inside or wholly outside of this range.
    """
    size, more = literal(width), literal(reach)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        target, source, place, first, limit = args[:5]
        element = source.type.pointee
        for number in range(2 * more + 1):
            where = builder.add(place, i64((number - more) * size))
            keep = [builder.gep(target, [i64(number * size + i)]) for i in range(size)]
            for address in keep:
                builder.store(ir.Constant(element, 0), address)
            after = builder.icmp_signed(">=", where, first)
            inside = builder.and_(after, builder.icmp_signed("<=", builder.add(where, i64(size)), limit))
            with builder.if_then(inside, likely=True):
                aligned = _is_vector(builder, source, where, limit, size)
                with builder.if_else(aligned, likely=True) as (then, otherwise):
                    with then:
                        for address, value in zip(keep, _load_vector(builder, source, where, size), strict=True):
                            builder.store(value, address)
                    with otherwise:
                        for i, address in enumerate(keep):
                            builder.store(builder.load(builder.gep(source, [builder.add(where, i64(i))])), address)
        return context.get_dummy_value()

    known = (types.int64, types.int64, types.int64)
    return signature(types.none, lanes, pointer, *known, width, reach), codegen


def store_row(typingctx: Any, lanes: Any, pointer: Any, at: Any, step: Any, end: Any, width: Any, count: Any) -> Any:
    """Store the thread's vectors of a row that ends before index ``end``."""
    size, number = literal(width), literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, target, place, distance, limit = args[:5]
        for vector, where in enumerate(_places(builder, place, distance, number)):
            values = [builder.load(builder.gep(source, [i64(vector * size + i)])) for i in range(size)]
            with builder.if_else(_is_vector(builder, target, where, limit, size), likely=True) as (then, otherwise):
                with then:
                    _store_vector(builder, target, where, values)
                with otherwise:
                    base, left = builder.gep(target, [where]), builder.trunc(builder.sub(limit, where), i32)
                    for i, value in enumerate(values):
                        with builder.if_then(builder.icmp_signed("<", i32(i), left)):
                            builder.store(value, builder.gep(base, [i64(i)]))
        return context.get_dummy_value()

    return signature(types.none, lanes, pointer, types.int64, types.int64, types.int64, width, count), codegen


FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        first_element,
        vector_step,
        whole_vectors,
        is_aligned,
        lanes_of,
        load_lanes,
        load_lanes_inside,
        store_lanes,
        load_row,
        load_around,
        store_row,
    )
}
