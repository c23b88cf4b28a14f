"""Teams of warps for small products: which tile, how many teams, and whether a library's call takes longer.

Times are in cycles of a multiprocessor, by the model of an H100 (docs/estimates.md); no GPU has measured them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..program.lowering import DeviceProperties, Lowering
from ..program.symbolic import Dim, ceildiv, hint, le
from .library_form import holds
from .library_times import CONVOLUTION, Rates, library_time
from .tile_shapes import RESIDENT, SIZES, STEP, Team, team_forms

BEGIN = 3300.0
"""Of a library's call, before its first block works: 1.8 us, which ours does not take."""
LAUNCH = 2900.0
"""From one kernel to the next one: 1.6 us."""
PARTS = 1800.0
"""That a library takes more where it cuts k in parts."""
LIBRARY_RATE = 3277.0
"""Multiplications and additions of 16-bit numbers in a cycle of a multiprocessor, of a library's largest tiles."""
SHARING = 2
"""Multiprocessors that share what a library's kernel reads."""
MATRIX_RATE = 41.0
"""Sums in a cycle of a multiprocessor to which our kernels add what 64 bytes along k give."""
COPY_RATE = 14.0
"""Bytes that it copies in a cycle, read and written, for each multiprocessor."""
L2_RATE = 24.0
"""Bytes of the L2 in a cycle, for each multiprocessor."""
ISSUED = 3.2
"""Instructions in a cycle of a multiprocessor, and..."""
WAITED = 2.4
"""...cycles of an instruction for a warp that has no others to wait with."""
REGISTERS = 90
"""Of a thread beside its sums."""
LATENCY = 800.0
"""Of the first copies, and of barriers at the end."""
ROUND = 30.0
"""Of the loads of a step from shared memory, and of its barrier."""
ARRIVED = 200.0
"""From the copies of one step to those of the next, of which two are on their way."""


@dataclass(frozen=True)
class Problem:
    """A product of the sizes that are expected.

    Its first operand may be patches of an image, with so many ``taps``: places of a window. 0 says that it is not. Of
    ``is_compact`` weights half as much is read (`compact_weights`).
    """

    kind: str
    rows: int
    columns: int
    batch: int
    depth: int
    taps: int
    is_compact: bool


def choose_team(
    device: DeviceProperties,
    kind: str,
    rows: Dim,
    columns: Dim,
    batch: Dim,
    depth: Dim,
    *,
    taps: int = 0,
    is_compact: bool = False,
    products: int = 1,
    copied: int = 0,
) -> Team | None:
    """The teams that take the least time for the product; None where a library's call takes less.

    It may stand for several ``products``, each of which would be a launch. Of a library's result so many bytes are
    ``copied`` by a kernel of its own.
    """
    problem = Problem(kind, hint(rows), hint(columns), hint(batch), hint(depth), taps, is_compact)
    team, cycles = _fastest(device.compute_capability, device.multiprocessors, problem)
    limit = _library_cycles(device, problem) + (products - 1) * LAUNCH
    if copied:
        limit += LAUNCH + 2 * copied / (COPY_RATE * device.multiprocessors)
    return team if cycles <= limit else None


def team_blocks(team: Team, rows: Dim, columns: Dim, batch: Dim) -> Dim:
    return ceildiv(rows, team.tile.m) * ceildiv(columns, team.tile.n) * batch


def holds_for(ctx: Lowering, team: Team, rows: Dim, columns: Dim, batch: Dim) -> bool:
    """Whether the choice of a team holds: the busiest multiprocessor has no block more. A guard says so."""
    blocks, multiprocessors = team_blocks(team, rows, columns, batch), ctx.device.multiprocessors
    return holds(ctx, le(blocks, -(-hint(blocks) // multiprocessors) * multiprocessors))


@functools.lru_cache(maxsize=1024)
def _fastest(capability: tuple[int, int], multiprocessors: int, problem: Problem) -> tuple[Team, float]:
    """And its time. A step is asked about when it is chosen, and when it is launched; networks repeat theirs."""
    forms = team_forms(problem.kind, problem.is_compact, along_k=problem.taps > 0, capability=capability)
    times = ((_cycles(multiprocessors, problem, team), team) for team in forms)
    (cycles, _), team = min(times, key=lambda entry: entry[0])
    return team, cycles


def _cycles(multiprocessors: int, problem: Problem, team: Team) -> tuple[float, float]:
    """And for how long a thread by itself waits, where the slowest pipe is the same."""
    tile = team.tile
    parts = _parts(problem, team)
    steps = -(-problem.depth // tile.k)
    blocks = hint(team_blocks(team, problem.rows, problem.columns, problem.batch))
    each = -(-blocks // multiprocessors)
    loads = _loads(problem, team)
    columns = tile.n / (2 if problem.is_compact else 1)  # as many take as long to read
    begin, own_steps, step = _instructions(problem, team)
    issued = begin + own_steps * step
    wavefronts = steps * ((tile.m + columns) * parts / 2 + 4 * loads * team.warps)
    wavefronts += team.teams * tile.m * tile.n / 10 + 100
    # A block has what the windows of its patches share in its L1.
    fetched = tile.m * min(1.0, 3 / max(1, problem.taps)) + columns
    read = (
        blocks * fetched * STEP * parts * steps + problem.rows * problem.columns * problem.batch * SIZES[problem.kind]
    )
    height, width = team.warp
    registers = height * width // 32 + REGISTERS
    resident = RESIDENT if team.teams == 1 else max(1, (1 << 16) // registers // (tile.threads * team.teams))
    step_waits = max(WAITED * step + ROUND * (parts + (team.warps > 1)), ARRIVED * parts)
    waits = -(-each // resident) * (WAITED * begin + LATENCY + own_steps * step_waits)
    pipes = (
        each * team.warps * team.teams * issued / ISSUED,
        each * wavefronts,
        each * steps * parts * tile.m * tile.n / MATRIX_RATE,
        read / (L2_RATE * multiprocessors),
    )
    return max(*pipes, waits), waits


def _loads(problem: Problem, team: Team) -> float:
    """Instructions of a warp that load matrices in a step."""
    height, width = team.warp
    return (height * 2 + width * (1 if problem.is_compact else 2)) / 16 * _parts(problem, team)


def _parts(problem: Problem, team: Team) -> int:
    """Of 64 bytes in a step."""
    return team.tile.k * SIZES[problem.kind] // STEP


def _instructions(problem: Problem, team: Team) -> tuple[float, float, float]:
    """Of a thread before and after its steps; its steps; and the instructions of one."""
    tile = team.tile
    height, width = team.warp
    steps = max(1.0, -(-problem.depth // tile.k) / team.teams)
    if team.warps > 1:  # whose teams wait for each other
        steps = math.ceil(steps)
    parts = _parts(problem, team)
    pieces = parts * STEP // 16 / tile.threads  # of a line, a thread's part
    loads, copies = _loads(problem, team), (tile.m + tile.n / (2 if problem.is_compact else 1)) * pieces
    step = 27 + 2.5 * (loads + copies) + parts * height * width / 64  # products
    if problem.kind == "tf32":
        step += parts * (4 * height / 8 + (13 * width / 16 if problem.is_compact else 4 * width / 8))
    begin = 135 + height * width / 8
    if problem.taps > 1:
        step += 5 + 4.5 * tile.m * pieces
        begin += 25 + 12 * tile.m * pieces
    return begin, steps, step


def _library_cycles(device: DeviceProperties, problem: Problem) -> float:
    size = SIZES[problem.kind]
    rate = LIBRARY_RATE * 2 / size * (CONVOLUTION if problem.taps else 1.0)
    rates = Rates(device.multiprocessors, rate, L2_RATE * device.multiprocessors, PARTS, SHARING)
    return BEGIN + library_time(problem.rows, problem.columns, problem.depth, problem.batch, size, rates)[0]
