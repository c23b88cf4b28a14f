"""Teams of warps for small products: which tile, how many teams, and whether a library's call takes longer.

Times are in cycles of a multiprocessor, by the model of an H100 (docs/estimates.md); no GPU has measured them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from ..program.lowering import DeviceProperties, Lowering
from ..program.scalar import reachable
from ..program.steps import Sums
from ..program.symbolic import Dim, ceildiv, hint, le, product
from .epilogue import VECTOR
from .library_form import holds
from .library_times import CONVOLUTION, Rates, library_time
from .tile_shapes import SIZES, STEP, Team, team_forms
from .tiles import VECTORS

BEGIN = 3300.0
"""Of a library's call, before its first block works: 1.8 us, which ours does not take."""
LAUNCH = 2900.0
"""From one kernel to the next one: 1.6 us."""
NEARLY = 0.98
"""Of the time of a library, from which on its call is as good."""
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
L2_READ = 37.0
"""Bytes that the L2 gives in a cycle, for each multiprocessor, and..."""
L2_WRITTEN = 17.0
"""...bytes that it takes."""
READ = 400.0
"""Of loads of what is added to sums, of several at once."""
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
MOST_PARTS = 8
"""Into which k is cut for a step that adds them up."""
ADDED = 100.0
"""Of a thread that adds one more part."""
_instructions_of = {"div": 8, "sqrt": 8, "exp": 8, "log": 10, "sigmoid": 16, "tanh": 16, "erf": 25, "pow": 40}


@dataclass(frozen=True)
class Problem:
    """A product of the sizes that are expected.

    Its first operand may be patches of an image, with so many ``taps``: places of a window. 0 says that it is not. Of
    ``is_compact`` weights half as much is read (`compact_weights`). Lines of both operands may run ``along_k``. What
    follows a sum takes ``finish`` instructions, and ``reads`` a tensor of the result's size. ``is_part`` says that
    sums are stored as they are, of 4 bytes.
    """

    kind: str
    rows: int
    columns: int
    batch: int
    depth: int
    taps: int
    is_compact: bool
    along_k: bool
    finish: int
    reads: bool
    is_part: bool = False


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
    along_k: bool = False,
    finish: int = 0,
    reads: bool = False,
    products: int = 1,
    left: int = 0,
    library: str | None = None,
) -> Team | None:
    """The teams that take the least time for the product; None where a library's call takes less.

    For the other parameters see `Problem`. It may stand for several ``products``, each of which would be a launch. Of a
    library's result so many bytes are ``left`` to a kernel of its own, which copies them or finishes them. A
    ``library`` multiplies the same kind, or that one; "" says that there is none for the product.
    """
    sizes = (hint(rows), hint(columns), hint(batch), hint(depth))
    problem = Problem(kind, *sizes, taps, is_compact, along_k, finish, reads)
    team, cycles = _fastest(device.compute_capability, device.multiprocessors, problem)
    if library == "":
        return team
    called = replace(problem, kind=library or kind)
    limit = _library_cycles(device, called) + _left_cycles(device, called, left) + (products - 1) * LAUNCH
    return team if cycles <= NEARLY * limit else None


def choose_parts(
    device: DeviceProperties,
    kind: str,
    rows: Dim,
    columns: Dim,
    depth: int,
    *,
    along_k: bool = False,
    finish: int = 0,
    reads: bool = False,
    left: int = 0,
    library: str | None = None,
) -> int:
    """Into how many parts k is cut so that a product of 16-bit numbers takes the least time; 1 leaves it as it is.

    The step after it adds up the parts, and finishes them. Parameters as of `choose_team`.
    """
    sizes = (hint(rows), hint(columns))
    problem = Problem(kind, *sizes, 1, depth, 0, False, along_k, finish, reads)
    _, whole = _fastest(device.compute_capability, device.multiprocessors, problem)
    if library != "":
        whole = min(whole, _library_cycles(device, problem) + _left_cycles(device, problem, left))
    best = (whole, 1)
    for parts in range(2, MOST_PARTS + 1):
        if depth % (parts * STEP):
            continue
        part = replace(problem, batch=parts, depth=depth // parts, finish=0, reads=False, is_part=True)
        _, cycles = _fastest(device.compute_capability, device.multiprocessors, part)
        moved = sizes[0] * sizes[1] * parts / device.multiprocessors
        cycles += moved * 4 / L2_READ + ADDED * parts
        best = min(best, (cycles, parts))
    return best[1]


def _left_cycles(device: DeviceProperties, problem: Problem, left: int) -> float:
    """Of a kernel that copies or finishes so many bytes of a library's result."""
    if not left:
        return 0.0
    finished = left / SIZES[problem.kind] / 32 * problem.finish / ISSUED
    return LAUNCH + max(2 * left / COPY_RATE, finished) / device.multiprocessors


def finish_of(step: Sums, columns: Dim) -> dict[str, Any]:
    """What follows the step's sums, about, as parameters of `choose_team`: its result has so many columns."""
    results = reachable(value for value, _ in step.outputs)
    instructions = sum(_instructions_of.get(x.op, 1) for x in results if x.op not in ("leaf", "constant", "cast"))
    return {"finish": instructions, "reads": any(hint(product(x.shape)) > hint(columns) for _, x in step.inputs)}


def team_blocks(team: Team, rows: Dim, columns: Dim, batch: Dim) -> Dim:
    return ceildiv(rows, team.tile.m) * ceildiv(columns, team.tile.n) * batch


def holds_for(ctx: Lowering, team: Team, rows: Dim, columns: Dim, batch: Dim) -> bool:
    """Whether the choice of a team holds: the busiest multiprocessor has no block more. A guard says so."""
    blocks, multiprocessors = team_blocks(team, rows, columns, batch), ctx.device.multiprocessors
    return holds(ctx, le(blocks, -(-hint(blocks) // multiprocessors) * multiprocessors))


@functools.lru_cache(maxsize=1024)
def _fastest(capability: tuple[int, int], multiprocessors: int, problem: Problem) -> tuple[Team, float]:
    """And its time. A step is asked about when it is chosen, and when it is launched; networks repeat theirs."""
    more = {"along_k": problem.along_k, "is_image": problem.taps > 0}
    forms = team_forms(problem.kind, problem.is_compact, capability=capability, **more)
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
    # Of 16 columns the sums are read from the same banks by several rows.
    wavefronts += (team.teams + 1) * tile.m * tile.n / (16 if tile.n > 16 else 10) + 100
    # A block has what the windows of its patches share in its L1.
    fetched = tile.m * min(1.0, 3 / max(1, problem.taps)) + columns
    read = blocks * fetched * STEP * parts * steps
    written = problem.rows * problem.columns * problem.batch * (4 if problem.is_part else SIZES[problem.kind])
    height, width = team.warp
    registers = height * width // 32 + REGISTERS
    resident = team.resident if team.teams == 1 else max(1, (1 << 16) // registers // (tile.threads * team.teams))
    step_waits = max(WAITED * step + ROUND * (parts + (team.warps > 1)), ARRIVED * parts)
    waits = WAITED * begin + LATENCY + own_steps * step_waits
    if problem.reads:
        waits += READ * math.ceil(tile.m * tile.n / (tile.threads * team.teams) / (VECTOR * VECTORS))
    waits *= -(-each // resident)
    pipes = (
        each * team.warps * team.teams * issued / ISSUED,
        each * wavefronts,
        each * steps * parts * tile.m * tile.n / MATRIX_RATE,
        (read / L2_READ + written / L2_WRITTEN) / multiprocessors,
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
    begin = 135 + height * width / 8 + problem.finish * height * width / 32 / team.teams
    if problem.taps > 1:
        step += 5 + 4.5 * tile.m * pieces
        begin += 25 + 12 * tile.m * pieces
    return begin, steps, step


def _library_cycles(device: DeviceProperties, problem: Problem) -> float:
    size = SIZES[problem.kind]
    rate = LIBRARY_RATE * 2 / size * (CONVOLUTION if problem.taps else 1.0)
    rates = Rates(device.multiprocessors, rate, L2_READ * device.multiprocessors, PARTS, SHARING)
    return BEGIN + library_time(problem.rows, problem.columns, problem.depth, problem.batch, size, rates)[0]
