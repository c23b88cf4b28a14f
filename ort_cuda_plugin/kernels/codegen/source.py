"""Kernel source: translates scalar expressions to Python text for Numba, and collects the kernel's parameters.

Numba widens int32 arithmetic to int64, and float32 arithmetic with Python numbers to float64, so the text casts every
value to its own type. 16-bit and narrower floats are float32 in registers; bool tensors are bytes of 0 or 1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar, overload

from ...compiler.kernel import KernelSpec
from ...model.ir import HALVES, NARROW_FLOATS, DType, Unsupported
from ...program.analysis.verify import is_wanted
from ...program.expressions.scalar import INFIX, Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Arg, Float32, Float64, Int32, Int64, Lowering, Tensor
from ...program.steps.steps import Input
from ...program.steps.trace import InPlace, Remake, Use
from .fragment import check_parameters

T = TypeVar("T", bound=Hashable)
MAX_PARAMETERS = 64
"""Maximum number of kernel parameters: the limit of the emulated device (``OCP_EMU_MAX_PARAMS``)."""

_wrapping = ("add", "sub", "mul")
_comparisons = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def register_type(dtype: DType) -> str:
    """Return the Numba type that holds an element in a register; "" for bool, which needs no cast."""
    if dtype is DType.BOOL:
        return ""
    return "float32" if dtype in NARROW_FLOATS else dtype.numpy.name


def literal(value: int | float | bool, dtype: DType) -> str:
    """Return ``value`` as source text of ``dtype``'s register type."""
    if dtype is DType.BOOL:
        return str(bool(value))
    if dtype.is_float and not math.isfinite(value):
        text = "math.nan" if value != value else "math.inf" if value > 0 else "-math.inf"
    else:
        text = repr(value)
    return f"{register_type(dtype)}({text})"


def load_text(pointer: str, index: str, dtype: DType) -> str:
    """Return the source that loads ``pointer[index]`` and converts it to the register type of ``dtype``."""
    element = f"{pointer}[{index}]"
    if dtype is DType.BOOL:
        return f"{element} != 0"
    return f"{dtype.short}_to_f32({element})" if dtype in NARROW_FLOATS else element


def encode_text(x: str, source: DType, target: DType, saturate: bool = True, round_mode: str = "up") -> str:
    """Return the source that rounds register value ``x`` to the bits of narrow float ``target``; see `scalar.cast`."""
    exact = target in HALVES
    mode = f"_{round_mode}" if target is DType.FLOAT8E8M0 else ""
    number = f"f64_to_f32_odd({x})" if source is DType.FLOAT64 else f"float32({x})"
    return f"f32_to_{target.short}{mode}{'_saturated' if saturate and not exact else ''}({number})"


def cast_text(x: str, source: DType, target: DType, saturate: bool = True, round_mode: str = "up") -> str:
    """Return the source that converts register value ``x`` between element types; see `scalar.cast`."""
    if source is DType.BOOL:
        return f"choose({x}, {literal(1, target)}, {literal(0, target)})"
    if target is DType.BOOL:
        return f"{x} != {literal(0, source)}"
    if target in NARROW_FLOATS:
        return f"{target.short}_to_f32({encode_text(x, source, target, saturate, round_mode)})"
    if target.is_packed:
        whole = f"int64({x})"
        if target.numpy.kind == "u":
            return f"uint8({whole} & {(1 << target.bits) - 1})"
        return f"int8(({whole} << {64 - target.bits}) >> {64 - target.bits})"
    if source.is_float and target.is_integer and target.itemsize < 4:
        return f"{register_type(target)}(int64({x}))"
    return f"{register_type(target)}({x})"


@dataclass(frozen=True, eq=False)
class Combination:
    """Operator of an atomic update: ``step`` computes the new element from the old one and a value.

    ``instruction`` names the atomic instruction that does the same, "" if there is none. Integers are updated by this
    instruction, floats only if it is "add".
    """

    step: Callable[[Scalar, Scalar], Scalar]
    instruction: str = ""


def atomic_type(dtype: DType, how: Combination) -> DType:
    """Return the type by which an atomic update accesses memory: for compare-and-swap of floats an unsigned integer."""
    if not dtype.is_float or how.instruction == "add":
        return dtype
    return DType.UINT64 if dtype is DType.FLOAT64 else DType.UINT32


NESTED_DIVISIONS = 4
"""Nesting depth of integer divisions after which the result passes through an ``opaque_*`` intrinsic.

The intrinsic hides the inner divisions from LLVM, whose compile time may double with each further level.
"""


class Emitter:
    """Writer of a kernel's body. `value` emits the computation of a Scalar and returns the variable that holds it.

    Each distinct computation is emitted once per scope. `bind` assigns a leaf its source; ``handlers`` emit operations
    that only the kernel's generator can translate, such as loads through an index map.
    """

    def __init__(self, prefix: str = "v", indent: int = 1) -> None:
        self.lines: list[str] = []
        self.handlers: dict[str, Callable[[Scalar], str]] = {}
        self.suffix = ""
        """Suffix of the variables emitted from now on."""
        self._prefix = prefix
        self._indent = indent
        self._count = 0
        self._divisions: dict[Scalar, int] = {}
        self._reciprocals: dict[Scalar, str] = {}
        self.known: dict[Scalar, float] = {}
        """Values of leaves that stand for one-element constants."""
        self._names: list[dict[Scalar, str]] = [{}]
        self._computed: list[dict[str, str]] = [{}]

    def line(self, text: str) -> None:
        self.lines.append("    " * self._indent + text)

    def fresh(self, prefix: str = "") -> str:
        self._count += 1
        return f"{prefix or self._prefix}{self._count}{self.suffix}"

    def lanes(self, pointer: str, count: int) -> str:
        """Return a variable with new registers for ``count`` elements of the type at ``pointer``."""
        name = self.fresh("r")
        self.line(f"{name} = lanes_of({pointer}, {count})")
        return name

    def assign(self, text: str) -> str:
        """Return a variable that holds ``text``. Equal texts share it, since no variable in them is assigned twice."""
        for scope in reversed(self._computed):
            if text in scope:
                return scope[text]
        name = self.fresh()
        self.line(f"{name} = {text}")
        self._computed[-1][text] = name
        return name

    def taken(self) -> list[str]:
        """Return the lines so far and remove them from the emitter."""
        lines, self.lines = self.lines, []
        return lines

    @contextmanager
    def detached(self) -> Iterator[list[str]]:
        """Redirect the lines emitted in the ``with`` block to the list that it yields."""
        before, self.lines = self.lines, []
        apart = self.lines
        yield apart
        self.lines = before

    @contextmanager
    def scope(self) -> Iterator[None]:
        """At the end of the ``with`` block, forget the variables that it assigned: later code must not read them."""
        self._names.append({})
        self._computed.append({})
        yield
        self._names.pop()
        self._computed.pop()

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Emit ``header``, such as "if x:", and indent the lines of the ``with`` block, which is a scope."""
        self.line(header)
        self._indent += 1
        with self.scope():
            yield
        self._indent -= 1

    def release(self) -> None:
        """Drop the handlers and all Scalars, and keep only the finished ``lines``.

        Both may refer to the kernel's generator, which refers to this emitter: the cycle would keep all of them alive.
        """
        self.handlers.clear()
        self.known.clear()
        self._divisions.clear()
        self._reciprocals.clear()
        for names in self._names:
            names.clear()

    def bind(self, leaf: Scalar, name: str) -> None:
        self._names[-1][leaf] = name

    def bound(self, x: Scalar) -> str | None:
        """Return the variable that holds x in an open scope; None if no variable does."""
        for scope in reversed(self._names):
            name = scope.get(x)
            if name is not None:
                return name
        return None

    def value(self, x: Scalar) -> str:
        """Emit x if necessary, and return its variable. Not recursive: expressions can be as deep as the model."""
        pending = [x]
        while pending:
            current = pending[-1]
            if self.bound(current) is None:
                if current.op not in self.handlers:
                    operands = [operand for operand in current.operands if self.bound(operand) is None]
                    if operands:
                        pending += reversed(operands)
                        continue
                self._names[-1][current] = self._emitted(current)
            pending.pop()
        name = self.bound(x)
        assert name is not None
        return name

    def hoist(self, roots: Iterable[Scalar], varies: Mapping[Scalar, bool]) -> None:
        """Emit the loop-invariant subexpressions of ``roots``, and reciprocals of loop-invariant divisors (`invert`).

        ``varies`` tells which values differ between the loop's iterations.
        """
        seen: set[Scalar] = set()
        stack = list(roots)
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if not varies[x]:
                if x.op != "constant":
                    self.value(x)
                continue
            stack += x.operands
            if x.op == "div" and not varies[x.operands[1]]:
                self.invert(x)

    def invert(self, quotient: Scalar) -> None:
        """Emit the reciprocal of ``quotient``'s divisor; later code multiplies by it instead of dividing.

        For 16-bit floats the product rounds to the same number as the quotient, if that is normal: a quotient of two
        11-bit significands is farther from a rounding boundary than the error of the float32 product. A quotient below
        2**-14 may be on a boundary, and may then round the other way. For a float32 division by a known number,
        `quotient_by_f32` corrects the product.
        """
        divisor = quotient.operands[1]
        if divisor not in self._reciprocals and (quotient.dtype in HALVES or self._is_moderate(divisor)):
            self._reciprocals[divisor] = self.assign(f"float32(1) / {self.value(divisor)}")

    def _is_moderate(self, x: Scalar) -> bool:
        """Tell whether x is a known float32 number between 2**-64 and 2**64, whose reciprocal is far from overflow."""
        number = x.value if x.op == "constant" else self.known.get(x, 0.0)
        return x.dtype is DType.FLOAT32 and 2.0**-64 <= number <= 2.0**64

    def _emitted(self, x: Scalar) -> str:
        if x.op == "constant":
            return literal(x.value, x.dtype)
        if x.op in self.handlers:
            return self.handlers[x.op](x)
        depth = max((self._divisions.get(operand, 0) for operand in x.operands), default=0)
        if x.op not in ("truncdiv", "truncmod"):
            self._divisions[x] = depth
            return self.assign(self._text(x))
        self._divisions[x] = depth + 1
        text = self._text(x)
        if self._divisions[x] % NESTED_DIVISIONS == 0:
            width = "i64" if x.dtype.itemsize == 8 else "i32"
            text = f"{register_type(x.dtype)}(opaque_{width}({text}))"
        return self.assign(text)

    def store(self, pointer: str, index: str, x: Scalar) -> None:
        """Emit the store ``pointer[index] = x``, with the conversion of x to its type in memory."""
        self.line(f"{pointer}[{index}] = {self.memory_form(x)}")

    def memory_form(self, x: Scalar) -> str:
        """Return the source that converts x from its register type to its type in memory."""
        if x.dtype in NARROW_FLOATS:
            # The store rounds to the narrow type: skip a cast of x to the same type, but keep its rounding mode.
            cast = x.op == "cast" and x.operands[0].dtype is not DType.BOOL
            saturate, round_mode = x.value if cast else (False, "up")
            source = x.operands[0] if cast else x
            return encode_text(self.value(source), source.dtype, x.dtype, saturate, round_mode)
        if x.dtype is DType.BOOL:
            return f"choose({self.value(x)}, uint8(1), uint8(0))"
        return self.value(x)

    def combine(self, pointer: str, index: str, x: Scalar, how: Combination) -> None:
        """Emit the atomic ``pointer[index] = how.step(pointer[index], x)``; ``pointer`` has x's `atomic_type`."""
        short, stored = x.dtype.short, atomic_type(x.dtype, how).short
        value = self.value(x)
        if stored == short and how.instruction:
            self.line(f"atomic_{how.instruction}_{short}({pointer}, int64({index}), {value})")
            return
        at, before, seen = self.assign(f"int64({index})"), self.fresh(), self.fresh()
        self.line(f"{before} = {pointer}[{at}]")
        with self.block("while True:"):
            old = Scalar(x.dtype, "leaf")
            self.bind(old, before if stored == short else self.assign(f"{stored}_as_{short}({before})"))
            new = self.value(how.step(old, x))
            after = new if stored == short else f"{short}_as_{stored}({new})"
            self.line(f"{seen} = atomic_cas_{stored}({pointer}, {at}, {before}, {after})")
            self.line(f"if {seen} == {before}:")
            self.line("    break")
            self.line(f"{before} = {seen}")

    def _text(self, x: Scalar) -> str:
        operands = [self.value(operand) for operand in x.operands]
        source = x.operands[0].dtype if x.operands else x.dtype
        a = operands[0] if operands else ""
        b = operands[1] if len(operands) > 1 else ""
        if x.op == "cast":
            return cast_text(a, source, x.dtype, *x.value)
        if x.op in _comparisons:
            return f"{a} {INFIX[x.op]} {b}"
        if x.op in _wrapping and x.dtype is DType.INT64:
            # ONNX integers wrap, but Numba tells LLVM that int64 arithmetic does not overflow (nsw): compute in uint64.
            return f"int64(uint64({a}) {INFIX[x.op]} uint64({b}))"
        if x.op == "div" and x.operands[1] in self._reciprocals:
            reciprocal = self._reciprocals[x.operands[1]]
            return f"{a} * {reciprocal}" if x.dtype in HALVES else f"quotient_by_f32({a}, {b}, {reciprocal})"
        if x.dtype in HALVES and x.op == "div" and x.operands[0].op == "constant" and x.operands[0].value == 1.0:
            return f"half_reciprocal({b})"
        if x.dtype in HALVES and x.op == "exp":
            return f"half_exp({a})"
        if x.op in INFIX:
            text = f"{a} {INFIX[x.op]} {b}"
            return f"{register_type(x.dtype)}({text})" if x.dtype.is_integer else text
        if x.op == "where":
            return f"choose({a}, {operands[1]}, {operands[2]})"
        if x.op in ("min", "max"):
            return self._extreme(x, a, b)
        if x.op == "not":
            return f"not {a}" if x.dtype is DType.BOOL else f"{register_type(x.dtype)}(~{a})"
        if x.op == "neg":
            return self._negative(a, x.dtype)
        if x.op == "abs" and not x.dtype.is_float:
            return f"choose({a} >= 0, {a}, {self._negative(a, x.dtype)})"
        if x.op in ("truncdiv", "truncmod"):
            width = x.dtype.short if x.dtype.itemsize >= 4 else "i32"
            return f"{register_type(x.dtype)}({x.op}_{width}({a}, {b}))"
        if x.op == "half_erf":
            return f"half_erf({a})"
        function = "fabs" if x.op == "abs" else x.op
        suffix = "" if x.dtype is DType.FLOAT64 else "f"
        return f"libdevice.{function}{suffix}({', '.join(operands)})"

    def _negative(self, a: str, dtype: DType) -> str:
        if dtype.is_float:
            return f"-{a}"
        return f"int64(uint64(0) - uint64({a}))" if dtype is DType.INT64 else f"{register_type(dtype)}(-{a})"

    def _extreme(self, x: Scalar, a: str, b: str) -> str:
        order = "<" if x.op == "min" else ">"
        if not x.dtype.is_float:
            return f"choose({a} {order} {b}, {a}, {b})"
        constant = x.operands[1]
        if constant.op == "constant" and constant.value == constant.value:
            return f"choose({b} {order} {a}, {b}, {a})"
        return f"choose(({a} {order} {b}) | ({a} != {a}), {a}, {b})"


class text_property(Generic[T]):
    """Property that generates a kernel's body, cached by the value of its frozen dataclass object.

    Each lowering creates new, often equal kernel objects. Generating a body takes longer than the rest of a lowering.
    """

    def __init__(self, write: Callable[[T], str]) -> None:
        self._write = cache(write)
        self.__doc__ = write.__doc__

    @overload
    def __get__(self, instance: None, owner: type[T]) -> text_property[T]: ...
    @overload
    def __get__(self, instance: T, owner: type[T]) -> str: ...
    def __get__(self, instance: T | None, owner: type[T]) -> str | text_property[T]:
        return self if instance is None else self._write(instance)


class Parameters:
    """Parameters of a kernel: name, type and launch argument of each.

    Sizes and strides are parameters and not constants, so that kernels for other shapes have the same source. A
    parameter that is added without a name gets a new name that begins with ``prefix``.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._signature: list[str] = []
        self._names: list[str] = []
        self._args: list[Arg] = []
        self._writes: list[Tensor] = []

    def _parameter(self, name: str, initial: str, kind: str, arg: Arg) -> str:
        name = name or f"{self._prefix}{initial}{len(self._names)}"
        self._signature.append(kind)
        self._names.append(name)
        self._args.append(arg)
        return name

    def tensor(self, x: Tensor, name: str = "", *, written: bool = False) -> str:
        """Add a pointer parameter whose argument is the address of x's first element; return its name."""
        if written:
            self._writes.append(x)
        return self._parameter(name, "y" if written else "x", f"*{x.dtype.short}", x)

    def integer(self, value: Dim, dtype: DType = DType.INT64, name: str = "") -> str:
        """Add an integer parameter of type int32 or int64; return its name."""
        arg = Int32(value) if dtype is DType.INT32 else Int64(value)
        return self._parameter(name, "n", dtype.short, arg)

    def integers(self, dtype: DType = DType.INT64, **values: Dim) -> None:
        """Add integer parameters under the names of the keywords."""
        for name, value in values.items():
            self.integer(value, dtype, name)

    def tensors(self, *, written: bool = False, **tensors: Tensor | None) -> None:
        """Add pointer parameters under the names of the keywords, except for None."""
        for name, x in tensors.items():
            if x is not None:
                self.tensor(x, name, written=written)

    def per_axis(self, axes: str, values: Mapping[str, Sequence[Dim]]) -> None:
        """Add, for each name in ``values``, an int32 parameter ``<name>_<axis>`` for each letter of ``axes``."""
        for name, sizes in values.items():
            for axis, size in zip(axes, sizes, strict=True):
                self.integer(size, DType.INT32, f"{name}_{axis}")

    def number(self, value: float, dtype: DType, name: str = "") -> str:
        """Add a float parameter, float64 for FLOAT64, else float32; return its name."""
        if dtype is DType.FLOAT64:
            return self._parameter(name, "f", "f64", Float64(value))
        return self._parameter(name, "f", "f32", Float32(value))

    def stride(self, value: Dim, dtype: DType = DType.INT64) -> str:
        """Add a stride as an integer parameter, and return its name. Strides 0 and 1 become literals of the source."""
        return str(value) if isinstance(value, int) and value in (0, 1) else self.integer(value, dtype)

    def include(self, *others: Parameters) -> None:
        """Append the parameters of all ``others``."""
        for other in others:
            self._signature += other._signature
            self._names += other._names
            self._args += other._args
            self._writes += other._writes


class KernelBuilder(Parameters):
    """A kernel under construction: its parameters, and its body (``emit``)."""

    def __init__(self, prefix: str = "", emit: Emitter | None = None) -> None:
        super().__init__(prefix)
        self.emit = emit or Emitter()

    def element(self, x: Tensor) -> str | None:
        """Add a parameter for x's value, and return its source; None unless x has one element that the host knows."""
        if x.size != 1:
            return None
        if x.host is not None:
            raw = self.integer(x.host[0])
            return self.emit.assign(cast_text(raw, DType.INT64, x.dtype))
        number = constant_number(x)
        if number is None:
            return None
        name = self.number(float(number), x.dtype)
        # The round trip proves to LLVM that the number is a float16: arithmetic with it can be float16 instructions.
        return self.emit.assign(f"f16_to_f32(f32_to_f16({name}))") if x.dtype is DType.FLOAT16 else name

    def to_load(self, inputs: Iterable[Input]) -> list[Input]:
        """Return the inputs that a thread must load; bind the leaves of the others to parameters (`element`)."""
        loaded = []
        for leaf, x in inputs:
            element = self.element(x)
            if element is None:
                loaded.append((leaf, x))
            else:
                self.emit.bind(leaf, element)
                number = constant_number(x)
                if number is not None:
                    self.emit.known[leaf] = float(number)
        return loaded

    def launch(
        self,
        ctx: Lowering,
        name: str,
        grid: tuple[Dim, Dim, Dim],
        block: tuple[int, int, int],
        uses: Mapping[Tensor, Use] | None = None,
        shared_bytes: Dim = 0,
        *,
        body: str = "",
        bounded: bool = False,
        remake: Remake | None = None,
        turns: Dim = 1,
        resident: int = 0,
        in_place: Sequence[InPlace] = (),
    ) -> None:
        """Launch a kernel that consists of the emitted lines, or of ``body``, a text for exactly this block size.

        The compiler limits the registers of a kernel with a ``body`` so that ``resident`` blocks, at least one, fit on
        a multiprocessor. It limits the registers of a kernel of emitted lines only with ``bounded``, so that one block
        of size ``block`` fits. A block of at most 256 threads fits without a limit. Raises Unsupported if a kernel of
        emitted lines has more than `MAX_PARAMETERS` parameters.
        """
        names, signature = tuple(self._names), tuple(self._signature)
        self.emit.release()
        if is_wanted():
            check_parameters(name, body or "\n".join(self.emit.lines), names)
        if body:
            spec = _shared_spec(name, names, signature, body.strip("\n"), math.prod(block), resident)
        else:
            if len(names) > MAX_PARAMETERS:
                raise Unsupported(
                    "shape",
                    f"kernel {name} would have too many parameters for strides: got {len(names)} parameters, "
                    f"expected at most {MAX_PARAMETERS}",
                )
            spec = _spec(name, names, signature, "\n".join(self.emit.lines), math.prod(block) if bounded else 0)
        ctx.launch(
            spec,
            grid,
            block,
            self._args,
            shared_bytes=shared_bytes,
            writes=self._writes,
            uses=uses,
            remake=remake,
            turns=turns,
            in_place=in_place,
        )


def _spec(
    name: str, names: tuple[str, ...], signature: tuple[str, ...], body: str, launch_bounds: int, resident: int = 0
) -> KernelSpec:
    source = f"def kernel({', '.join(names)}):\n{body}\n"
    return KernelSpec(name, signature, source, launch_bounds, resident)


_shared_spec = cache(_spec)
"""`_spec` with a cache, for kernels with a ``body``: these bodies are long, and few of them differ."""


def constant_number(x: Tensor) -> int | float | bool | None:
    """Return the value of a one-element constant; None for other tensors, and for 8-bit and narrower floats."""
    if x.size != 1 or not x.is_constant or x.constant is None:
        return None
    value = x.constant.reshape(-1)[0]
    if x.dtype is DType.BFLOAT16:
        bits: float = struct.unpack("<f", struct.pack("<I", int(value) << 16))[0]
        return bits
    if x.dtype in NARROW_FLOATS - {DType.FLOAT16}:
        return None
    number: int | float | bool = value.item()
    return number


def offset_text(terms: Sequence[tuple[str, str]]) -> str:
    """Return the source of an offset: the sum of coordinate * stride over ``terms``, all int64."""
    parts = []
    for coordinate, stride in terms:
        if stride != "0":
            parts.append(coordinate if stride == "1" else f"{coordinate} * {stride}")
    return " + ".join(parts) or "0"


class StridedTensor:
    """A tensor parameter of a kernel that is addressed by int64 coordinates."""

    def __init__(
        self, builder: KernelBuilder, tensor: Tensor, *, written: bool = False, strides: Sequence[Dim] | None = None
    ) -> None:
        self.pointer = builder.tensor(tensor, written=written)
        self._strides = [builder.stride(stride) for stride in (tensor.strides if strides is None else strides)]

    def offset(self, *at: str) -> str:
        return offset_text(list(zip(at, self._strides, strict=True)))

    def load(self, *at: str) -> str:
        return f"{self.pointer}[{self.offset(*at)}]"


_NAME_LENGTH = 40


def kernel_name(ctx: Lowering) -> str:
    """Return a kernel name of at most 40 characters: the operator types of the nodes being lowered."""
    names = [node.op_type.lower() for node in ctx.nodes]
    return "_".join(names)[:_NAME_LENGTH] if names else "elementwise"
