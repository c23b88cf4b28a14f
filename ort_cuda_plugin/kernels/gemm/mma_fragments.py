"""Tensor-core tile of a GEMM: ``cp.async`` pipeline, ``mma`` instructions on fragments of warps, epilogue.

A block of four warps computes an ``m`` x ``n`` tile, in k steps of 64 bytes. The pipeline has three stages: copies run
two stages ahead of the multiplication, and a k step needs one barrier. Multiplying a step of 128 bytes takes longer
than a copy, so that two stages suffice for such tiles. `mma_copies` defines the layout of a stage.

With sliced-K, the warps of a block form groups that split the k steps; each group has pipeline stages of its own. At
the end the groups' accumulators are added in shared memory. A group of one warp needs no block barrier in a step.

float32 is rounded to TF32 between shared memory and the tensor cores. ``ldmatrix`` loads four float32 like eight 16-bit
elements, but cannot transpose them: if tile rows run along x (m or n), lanes load elements one by one, eight adjacent
elements of each of four rows.

TF32 weights may be stored as float16 (`tf32_weights_as_f16`). Their rows run along k, with each group of eight elements
in the order 0, 4, 1, 5, 2, 6, 3, 7: so a 32-bit word has the two elements that a lane multiplies.

8-bit integers need tile rows along k. Their int32 accumulators are stored in shared memory as the bits of floats.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.epilogue import Epilogue
from ..codegen.fragment import Fragment
from ..codegen.simt_fragments import indented, log2, store_rows
from ..contraction.prologue import ConvertedElement
from .low_rank import low_rank_start
from .mma_copies import OperandCopies, OperandTile
from .tile_shapes import DECLARED_BYTES, GAP, INTEGERS, block_bytes, operand_sizes


@dataclass(frozen=True)
class MatrixTile(OperandCopies):
    """Source of a block's tile: accumulators, pipeline over k, mma instructions of each warp, epilogue."""

    @property
    def block_bytes(self) -> int:
        """Bytes of shared memory per block."""
        return block_bytes(self.kind, operand_sizes(self.kind, self.is_compact), self.tile, self.sliced_k)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per block; 0 if the kernel declares its shared memory statically."""
        return self.block_bytes if self.sliced_k > 1 or self.block_bytes > DECLARED_BYTES else 0

    def fragment(self, rows: str, columns: str, epilogue: Epilogue) -> Fragment:
        """Return the fragment that computes the block's tile of a ``rows`` x ``columns`` result."""
        lines = [*self._declare(), *self._pipeline(), *self._store(rows, columns, epilogue)]
        return Fragment("mma_tile", "\n".join(lines))

    def after_low_rank(self, low: MatrixTile, scale: str, epilogue: Epilogue) -> tuple[Fragment, Fragment]:
        """Return two fragments of a block's tile: the product of ``low``, times ``scale``, and the operands' product.

        Both pipelines use the same shared memory. ``scale`` is a source, "" without a scale.
        """
        height, width = self.config.warp
        first = [
            "k0_of_tile, steps_of_tile = k0, steps",
            "k0 = int32(0)",
            *low_rank_start(low.depth),
            *low._declare(),
            *low._pipeline(),
            "copy_async_wait(0)",
            "cuda.syncthreads()",
            *([f"low_scale_value = {scale}"] if scale else []),
            *(f"sums[{i}] = sums[{i}] * low_scale_value" for i in range(height * width // 32 if scale else 0)),
            "k0, steps = k0_of_tile, steps_of_tile",
        ]
        others = [*self._declare(is_second=True), *self._pipeline(), *self._store("m", "n", epilogue)]
        low_rank = Fragment("mma_low_rank", "\n".join(first), "tile_c sums k0 steps")
        return low_rank, Fragment("mma_tile", "\n".join(others))

    def _declare(self, *, is_second: bool = False) -> list[str]:
        """Declare the thread's positions, and unless ``is_second``, shared memory and accumulators, set to 0."""
        rows, columns = self.config.warp
        warp_columns = self.config.warp_columns
        floats = 0 if self.shared_bytes else self.block_bytes // 4
        lines = [
            *([] if is_second else [f"tile_c = array_pointer(cuda.shared.array({floats}, float32, 16))"]),
            "tiles_at = shared_address(tile_c)",
            *self._warp_group(),
            "lane = int32(thread & 31)",
            f"warp_row = int32((thread >> {5 + log2(warp_columns)}) * {rows})",
            f"warp_column = int32(((thread >> 5) & {warp_columns - 1}) * {columns})",
        ]
        if not is_second:
            lines.append(f"sums = registers_{'i32' if self.kind in INTEGERS else 'f32'}({rows * columns // 32})")
        for of, element in zip(self.operands, self.elements, strict=True):
            lines += [] if isinstance(element, ConvertedElement) else self._copy_sources(of)
        for of, warp, number, x_first in self._loads:
            lines += self._lanes(of, warp, number, x_first) if of.is_loaded_by_matrices else []
        return lines

    def _warp_group(self) -> list[str]:
        """Compute the thread's index in its sliced-K warp group, and the group's first stage and first k."""
        if self.sliced_k == 1:
            return ["thread = int32(cuda.threadIdx.x)", "first_stage = int32(0)"]
        lines = [
            "block_thread = int32(cuda.threadIdx.x)",
            f"team = int32(uint32(block_thread) // uint32({self.tile.threads}))",
            f"thread = int32(block_thread - team * {self.tile.threads})",
            f"first_stage = opaque_i32(team * {self.stages * self.stage})",
            f"k0 = int32(k0 + team * {f'steps * {self.step_distance}' if self.has_contiguous_steps else self.tile.k})",
        ]
        if self.config.warps == 1:  # groups without common barriers may have different numbers of steps
            own = f"int32(int32({self.a.inner_bound} - k0 + {self.step_distance - 1}) >> {log2(self.step_distance)})"
            lines.append(f"steps = int32(min(steps, {own}))")
        return lines

    def _pipeline(self) -> list[str]:
        """Loop over the ``steps`` k steps from ``k0`` on.

        Each iteration fills the stage at ``filled`` with the step at ``k_first``, and multiplies the oldest stage, at
        ``multiplied``, which the next iteration fills.
        """
        last = (self.stages - 1) * self.stage
        fills = [
            line for of, element in zip(self.operands, self.elements, strict=True) for line in self._fill(of, element)
        ]
        return [
            f"last_stage = opaque_i32(int32(first_stage + {last}))",
            "filled = int32(first_stage)",
            f"multiplied = int32(first_stage + {self.stage})",
            # Opaque values keep LLVM from widening the counters to 64 bits, and from deriving other loop counters.
            "k_first = opaque_i32(k0)",
            f"k_filled = opaque_i32(k0 + {self.stages - 1} * {self.step_distance})",
            f"k_stop = opaque_i32(k0 + steps * {self.step_distance})",
            f"while k_first < int32(k_stop + {(self.stages - 1) * self.step_distance}):",
            "    if k_first >= k_filled:",
            f"        copy_async_wait({self.stages - 2})",
            f"        cuda.{'syncwarp' if self.config.warps == 1 else 'syncthreads'}()",
            "    if k_first < k_stop:",
            *indented(fills, 2),
            "    copy_async_commit()",
            "    filled = int32(multiplied)",
            "    if k_first >= k_filled:",
            "        stage_at = tiles_at + int64(multiplied)",
            *indented(self._multiply(), 2),
            f"    multiplied = choose(multiplied == last_stage, first_stage, int32(multiplied + {self.stage}))",
            f"    k_first = opaque_i32(k_first + {self.step_distance})",
        ]

    def _store(self, rows: str, columns: str, epilogue: Epilogue) -> list[str]:
        height, width = self.config.warp
        pitch = self.tile.n + GAP
        placed = [
            "copy_async_wait(0)",
            "cuda.syncthreads()",
            f"to = int64(int32((warp_row + (lane >> 2)) * {pitch} + warp_column + (lane & 3) * 2))",
        ]
        if self.sliced_k > 1:
            placed.append(f"to += int64(int32(team * {self.tile.m * pitch}))")
        for i in range(height // 16):
            for j in range(width // 8):
                for half in (0, 1):
                    at = (16 * i + 8 * half) * pitch + 8 * j
                    first = 4 * (i * (width // 8) + j) + 2 * half
                    pair = [f"sums[{first + i}]" for i in (0, 1)]
                    if self.kind in INTEGERS:
                        pair = [f"i32_as_f32({one})" for one in pair]
                    placed.append(f"store_f32x2(tile_c, to + {at}, {', '.join(pair)})")
        if self.sliced_k > 1:
            placed.append("thread = block_thread")
        total = "f32_as_i32({})" if self.kind in INTEGERS else "{}"
        return store_rows(self.tile, rows, columns, total, epilogue, placed, pitch, self.sliced_k)

    @property
    def _loads(self) -> tuple[tuple[OperandTile, str, int, bool], tuple[OperandTile, str, int, bool]]:
        """Return the arguments of `_load_fragments` for both operands."""
        a, b = self.operands
        height, width = self.config.warp
        return (a, "warp_row", height // 16, True), (b, "warp_column", width // 16, False)

    def _multiply(self) -> list[str]:
        body = []
        for half in range(self.tile.k * self.size // 32):
            for of, warp, number, x_first in self._loads:
                body += self._load_fragments(of, warp, number, x_first, half)
            (_, _, rows, _), (_, _, pairs, _) = self._loads
            for i in range(rows):
                of_a = ", ".join(f"a{i}_{r}" for r in range(4))
                for j in range(2 * pairs):
                    at = 4 * (i * 2 * pairs + j)
                    of_b = f"b{j // 2}_{2 * (j % 2)}, b{j // 2}_{2 * (j % 2) + 1}"
                    body.append(f"multiply_add_matrix_{self.kind}(sums, {at}, {of_a}, {of_b})")
        return body

    def _lanes(self, of: OperandTile, warp: str, number: int, x_first: bool) -> list[str]:
        """Compute the lane's ldmatrix offsets in a stage, from which those of all loads differ by constants.

        ``warp`` names the warp's first row or column; for ``number`` and ``x_first`` see `_load_fragments`. Opaque
        values stay in registers, instead of being recomputed in each k step.
        """
        low, high = "((lane >> 3) & 1)", "(lane >> 4)"
        x_bit, k_bit = (low, high) if x_first else (high, low)
        inner = of.operand.inner_major
        result = []
        for i in range(of.row_chunks // 2 if inner else number):
            if inner:
                line, chunk = f"({warp} + (lane & 7) + 8 * {x_bit})", f"{k_bit} + {2 * i}"
            else:
                line, chunk = f"((lane & 7) + 8 * {k_bit})", f"({warp} >> 3) + {x_bit} + {2 * i}"
            unit = of.chunk_index(f"{of.name}_line", chunk)
            result += [
                f"{of.name}_line = int32{line}",
                f"{of.name}_lane{i} = opaque_i32(int32({of.first} + {unit} * 16))",
            ]
        return result

    def _load_fragments(self, of: OperandTile, warp: str, number: int, x_first: bool, half: int) -> list[str]:
        """Load ``number`` fragments of four 8x16-byte matrices each, for the 32 bytes along k with index ``half``.

        With ``x_first`` the second matrix of a fragment is the next one along x, else along k.
        """
        if not of.is_loaded_by_matrices:
            return self._load_words(of, warp, number, x_first, half)
        if self._is_whole(of):
            return self._load_f16_weights(of, number, half)
        name, inner = of.name, of.operand.inner_major
        load = "load_matrices" if inner else "load_matrices_transposed"
        result = []
        for i in range(number):
            lane, sixteens = (half, i) if inner else (i, half)
            words = [f"{name}{i}_{r}" for r in range(4)]
            at = f"stage_at + int64({name}_lane{lane}) + {sixteens * 16 * of.row_chunks * 16}"
            result.append(f"{', '.join(words)} = {load}({at})")
            if self.kind == "tf32":
                result += [f"{word} = round_tf32(u32_as_f32({word}))" for word in words]
        return result

    def _load_f16_weights(self, of: OperandTile, number: int, half: int) -> list[str]:
        """Load fragments of TF32 weights stored as float16: an ldmatrix load serves two values of ``half``."""
        name, result = of.name, []
        for i in range(number):
            words = [f"{name}{i}_pair{r}" for r in range(4)]
            if half % 2 == 0:
                at = f"stage_at + int64({name}_lane{half // 2}) + {i * 16 * of.row_chunks * 16}"
                result.append(f"{', '.join(words)} = load_matrices({at})")
            for eight in (0, 1):
                for r, shift in enumerate(("", " >> uint32(16)")):
                    bits = f"uint16({words[2 * eight + half % 2]}{shift})"
                    result.append(f"{name}{i}_{2 * eight + r} = f32_as_u32(f16_to_f32({bits}))")
        return result

    def _load_words(self, of: OperandTile, warp: str, number: int, x_first: bool, half: int) -> list[str]:
        """Load fragments of 4-byte elements from tile rows along x, which ldmatrix cannot transpose."""
        name, pitch = of.name, of.extent
        result = [
            f"{name}_line = int32((lane & 3) + {half * 8})",
            f"{name}_at = int32(((multiplied + {of.first}) >> 2) + {name}_line * {pitch} + ((lane >> 2) & 3))",
        ]
        for eight in range(2 * number):
            chunk = f"(({warp} >> 2) + (lane >> 4) + {2 * eight})"
            result.append(f"{name}_x{eight} = int32({name}_at + ({chunk} ^ {of.swizzle(f'{name}_line')}) * 4)")
        for i in range(number):
            for r in range(4):
                along_x, along_k = (r & 1, r >> 1) if x_first else (r >> 1, r & 1)
                index = f"int64({name}_x{2 * i + along_x} + {4 * along_k * pitch})"
                result.append(f"{name}{i}_{r} = round_tf32(tile_c[{index}])")
        return result
