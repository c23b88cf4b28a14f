"""FlashAttention kernel without tensor cores; `flash` launches it."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.simt_fragments import Element, indented, log2, thread_tile
from ..codegen.source import text_property
from .multi_pass import AttentionKernel


@dataclass(frozen=True)
class Range:
    """Source lines that compute a row's key range and sink.

    ``first``, ``end`` and ``sink`` name the variables that hold the results, "" for a bound or sink that does not
    exist. The kernel runs ``block_lines`` once, and ``row_lines`` after each assignment of ``row``.
    """

    block_lines: tuple[str, ...] = ()
    row_lines: tuple[str, ...] = ()
    first: str = ""
    end: str = ""
    sink: str = ""


@dataclass(frozen=True)
class StreamKernel(AttentionKernel):
    """SIMT FlashAttention kernel. With ``split`` it stores a row's unnormalized accumulators, maximum and weight sum.

    A row that attends to no key gets NaN with ``nan``, else 0. ``elements`` load the elements of Q, K and V; None for
    plain loads.
    """

    range: Range = Range()
    split: bool = False
    nan: bool = False
    elements: tuple[Element, Element, Element] | None = None

    @property
    def name(self) -> str:
        return f"stream_{self.form.name}_{'split_' if self.split else ''}{'_'.join(dict.fromkeys(self.storage))}"

    def element(self, number: int) -> Element:
        return Element(self.storage[number]) if self.elements is None else self.elements[number]

    @text_property
    def body(self) -> str:
        lines = [
            *self.prologue(),
            *self.statistics(),
            *self._bounds(),
            *self._key_loop(),
            *(self._store_part() if self.split else self._finish()),
            *self.store(),
        ]
        return "\n".join(indented(lines, 1))

    def statistics(self) -> list[str]:
        m = self.form.m
        lines = [
            f"{name} = array_pointer(cuda.shared.array({count}, float32, 16))"
            for name, count in (("parts", self.form.threads), ("largest", m), ("total_weight", m), ("factors", m))
        ]
        return [
            *lines,
            f"mine = int32(thread & {m - 1})",
            f"lane = int32(thread >> {log2(m)})",
            f"if thread < {m}:",
            "    largest[int64(thread)] = float32(-math.inf)",
            "    total_weight[int64(thread)] = float32(0)",
        ]

    def _bounds(self) -> list[str]:
        """Restrict ``n`` and the loop over tiles to keys that the block's rows attend to, and to the block's split."""
        known = self.range
        lines = list(known.block_lines)
        if known.first or known.end:
            lines += ["lower, upper = int64(n), int64(0)"] if known.first else ["upper = int64(0)"]
            each = ["row = int32(min(int32(row0 + r), int32(m - 1)))", *known.row_lines]
            if known.first:
                each.append(f"lower = min(lower, {known.first})")
            each.append(f"upper = max(upper, {known.end})" if known.end else "upper = int64(n)")
            lines += [f"for r in range({self.form.m}):", *indented(each, 1)]
            lines.append("n = int32(max(int64(0), min(int64(n), upper)))")
            lines.append(f"tiles = int32((n + {self.form.keys - 1}) >> {log2(self.form.keys)})")
        low = f"int32(max(int64(0), min(int64(n), lower)) >> {log2(self.form.keys)})" if known.first else "int32(0)"
        lines.append(f"tile0 = {low}")
        return [*lines, *self._part()] if self.split else lines

    def _part(self) -> list[str]:
        """Restrict the loop over tiles of keys to the block's split of the keys."""
        return [
            "part = int32(cuda.blockIdx.y)",
            "per_part = int32(truncdiv_i32(int32(max(int32(tiles - tile0), int32(0)) + splits - 1), splits))",
            "tile0 = int32(tile0 + part * per_part)",
            "tiles = int32(min(tiles, int32(tile0 + per_part)))",
        ]

    def _key_loop(self) -> list[str]:
        form = self.form
        lanes = form.threads // form.m
        keys = f"for j in range(lane, {form.keys}, {lanes}):"
        minus = [f"for r in range({form.m}):", "    element_t[place + r] = float32(-math.inf)"]
        body = [
            f"key0 = int32(tile * {form.keys})",
            "at_tile = int32(0)",
            *self.scores(),
            *self.each_element(self.weights.passes[0], minus),
            "most = largest[int64(mine)]",
            keys,
            f"    most = max(most, element_t[int64(int32(j * {form.pitch} + mine))])",
            "parts[int64(thread)] = most",
            "cuda.syncthreads()",
            f"for j in range({lanes}):",
            f"    most = max(most, parts[int64(int32(j * {form.m} + mine))])",
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            "weight = float32(0)",
            "cuda.syncthreads()",
            keys,
            f"    at = int64(int32(j * {form.pitch} + mine))",
            "    x = libdevice.expf(element_t[at] - shift)",
            "    element_t[at] = x",
            "    weight += x",
            "parts[int64(thread)] = weight",
            "cuda.syncthreads()",
            f"if thread < {form.m}:",
            "    factor = libdevice.expf(largest[int64(mine)] - shift)",
            "    weight = total_weight[int64(mine)] * factor",
            f"    for j in range({lanes}):",
            f"        weight += parts[int64(int32(j * {form.m} + mine))]",
            "    total_weight[int64(mine)] = weight",
            "    largest[int64(mine)] = most",
            "    factors[int64(mine)] = factor",
            "cuda.syncthreads()",
            *self.scale(),
            *self.weighted_values(),
        ]
        return ["for tile in range(tile0, tiles):", *indented(body, 1)]

    def scale(self) -> list[str]:
        tile = self.form.result
        return [
            *thread_tile(tile),
            f"scale_tile_f32(result_sums, factors, int64(thread_row), {tile.thread_m}, {tile.thread_n})",
        ]

    def _finish(self) -> list[str]:
        """Divide the accumulators by the sum of each row's weights, including the weight of the sink."""
        lines = ["most = largest[int64(mine)]"]
        if self.range.sink:
            lines += ["row = int32(min(int32(row0 + mine), int32(m - 1)))", *self.range.row_lines]
            lines.append(f"most = max(most, {self.range.sink})")
        lines += [
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            "factor = libdevice.expf(largest[int64(mine)] - shift)",
            "weight = total_weight[int64(mine)] * factor",
        ]
        if self.range.sink:
            lines.append(f"weight += libdevice.expf({self.range.sink} - shift)")
        divided = "factor / weight" if self.nan else "choose(weight == float32(0), float32(0), factor / weight)"
        lines.append(f"factors[int64(mine)] = {divided}")
        return [f"if thread < {self.form.m}:", *indented(lines, 1), "cuda.syncthreads()", *self.scale()]

    def _store_part(self) -> list[str]:
        return [
            f"if thread < {self.form.m} and int32(row0 + thread) < m and column0 == 0:",
            "    at = (int64(part) * batches + int64(batch)) * int64(m) + int64(int32(row0 + thread))",
            "    maxima[at] = largest[int64(thread)]",
            "    weights[at] = total_weight[int64(thread)]",
        ]
