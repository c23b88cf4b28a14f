"""Pooling over windows and local response normalization, one thread per output element."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.kernel import KernelSpec, spec_property
from .tiles import THREADS, Element, element_number, indent, place_type, unravel

_lowest = {"f32": "float32(-math.inf)", "f64": "float64(-math.inf)", "f16": "float32(-math.inf)"}
_lowest |= {"bf16": "float32(-math.inf)", "i8": "int32(-128)", "u8": "int32(0)"}
_registers = {"i8": "int32", "u8": "int32"}


@dataclass(frozen=True)
class Pool:
    """Maximum, or average, of windows over the last ``rank`` dimensions of contiguous [planes, z, y, x].

    Arguments of a launch, in order (a letter of ``axes`` after each name that has one per axis)::

        out, [indices (*i64),] x, count (elements of out), then int32: kernel, dilation, in, out, stride,
        pad (at the beginning), [padded_end: in + pad at the end]

    ``indices`` adds the place of each maximum in the whole of x, ``column_major`` within its plane; ``include_pad``
    divides averages by the number of positions in the padded input and takes ``padded_end``. ``index`` is the type of
    count and of places in the tensors. The grid is (ceil(count / THREADS), 1, 1).
    """

    kind: str  # "max" or "average"
    storage: str
    rank: int
    indices: bool = False
    column_major: bool = False
    include_pad: bool = False
    index: str = "i32"

    @spec_property
    def spec(self) -> KernelSpec:
        element = Element(self.storage)
        register = _registers.get(self.storage, element.accumulator)
        axes = "zyx"[3 - self.rank :]
        matrix = f"*{self.storage}"
        parameters = [("out", matrix)]
        parameters += [("indices", "*i64")] if self.indices else []
        parameters += [("x", matrix), ("count", self.index)]
        whats = ["kernel", "dilation", "in", "out", "stride", "pad"] + ["padded_end"] * self.include_pad
        parameters += [(f"{what}_{axis}", "i32") for what in whats for axis in axes]
        place = place_type(self.index)
        lines = unravel(axes, self.index)
        for axis in axes:
            lines.append(f"{axis}0 = int32(o{axis} * stride_{axis} - pad_{axis})")
        lines.append("plane = rest")
        lines += [f"plane = {place}(plane * in_{axis})" for axis in axes]
        if self.kind == "max":
            lines += [f"best = {_lowest[self.storage]}", "best_at = plane"]
        else:
            lines += [f"total = {register}(0)", "covered = int32(0)"]
        lines += self._windows(axes, element, register)
        if self.kind == "max":
            lines.append(f"out[number] = {self._store('best', element)}")
            if self.indices:
                lines += self._index(axes)
        else:
            divisor = f"{register}(max(covered, int32(1)))"
            lines.append(f"out[number] = {element.cast(f'(total / {divisor})')}")
        header = f"def kernel({', '.join(name for name, _ in parameters)}):"
        return KernelSpec(
            name=f"{self.kind}_pool{self.rank}d_{self.storage}",
            signature=tuple(kind for _, kind in parameters),
            source="\n".join([header, indent("\n".join(lines), 1)]) + "\n",
            launch_bounds=THREADS,
        )

    def _store(self, value: str, element: Element) -> str:
        return {"i8": f"int8({value})", "u8": f"uint8({value})"}.get(self.storage, element.cast(value))

    def _windows(self, axes: str, element: Element, register: str) -> list[str]:
        """The loops over a window; ``at`` is the place in x of each position inside of it."""
        lines: list[str] = []
        level = 0

        def add(text: str) -> None:
            lines.append("    " * level + text)

        for number, axis in enumerate(axes):
            before = "plane" if number == 0 else f"line_{axes[number - 1]}"
            add(f"for k{axis} in range(kernel_{axis}):")
            level += 1
            add(f"at_{axis} = int32({axis}0 + int32(k{axis}) * dilation_{axis})")
            scale = " * ".join([f"at_{axis}", *(f"in_{inner}" for inner in axes[number + 1 :])])
            add(f"line_{axis} = {place_type(self.index)}({before} + {scale})")
        if self.include_pad:
            add("if " + " and ".join(f"at_{axis} < padded_end_{axis}" for axis in axes) + ":")
            add("    covered += 1")
        add("if " + " and ".join(f"uint32(at_{axis}) < uint32(in_{axis})" for axis in axes) + ":")
        value = element.load("x", f"line_{axes[-1]}")
        if self.kind == "max":
            add(f"    value = {register}({value})")
            add("    if value > best:")
            add("        best = value")
            add(f"        best_at = line_{axes[-1]}")
        else:
            add(f"    total += {value}")
            if not self.include_pad:
                add("    covered += 1")
        return lines

    def _index(self, axes: str) -> list[str]:
        if not self.column_major:
            return ["indices[number] = best_at"]
        place = place_type(self.index)
        lines = [f"rest = {place}(best_at - plane)"]
        for axis in reversed(axes):
            lines += [
                f"quotient = {place}(rest // in_{axis})",
                f"best_{axis} = {place}(rest - quotient * in_{axis})",
                "rest = quotient",
            ]
        offset = f"best_{axes[-1]}"
        for axis in reversed(axes[:-1]):
            offset = f"({offset} * in_{axis} + best_{axis})"
        return [*lines, f"indices[number] = plane + {offset}"]


def local_response_normalization(storage: str, index: str) -> KernelSpec:
    """LRN over the channels of contiguous [images, channels, size].

    Arguments: out, x, count (elements; of the ``index`` type), channels, before, after (int32: neighbours on either
    side), size (as count), and alpha / window, beta, bias in float32. The grid is (ceil(count / THREADS), 1, 1).

    out = x / (bias + alpha/window * sum(x[c - before .. c + after]^2))^beta, as ONNX defines it.
    """
    element = Element(storage)
    place = place_type(index)
    body = f"""
        plane = {place}(number // size)
        channel = int32(plane - {place}(plane // channels) * channels)
        first = max(int32(channel - before), int32(0))
        last = min(int32(channel + after), int32(channels - 1))
        at = {place}(number + (first - channel) * size)
        total = {element.accumulator}(0)
        for _ in range(int32(last - first + 1)):
            value = {element.load("x", "at")}
            total += value * value
            at = {place}(at + size)
        value = {element.load("x", "number")}
        scaled = value * math.pow(bias + scale * total, -beta)
        out[number] = {element.cast("scaled")}
        """
    return KernelSpec(
        name=f"lrn_{storage}",
        signature=(f"*{storage}", f"*{storage}", index, "i32", "i32", "i32", index, *[element.scalar] * 3),
        source="def kernel(out, x, count, channels, before, after, size, scale, beta, bias):\n"
        + indent(element_number(index), 1)
        + "\n"
        + indent(body, 1)
        + "\n",
        launch_bounds=THREADS,
    )
