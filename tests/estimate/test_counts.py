"""The counting mode of the emulated device, and the performance model, on known kernels."""

from __future__ import annotations

from functools import cache

import pytest

from kernel_launch import kernel
from ort_cuda_plugin import gpus
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.host.counts import add_counts, instructions, metadata
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.estimate import count, sass
from ort_cuda_plugin.estimate.count import Counted, count_all
from ort_cuda_plugin.estimate.model import estimate
from ort_cuda_plugin.estimate.pipes import kernel_seconds
from ort_cuda_plugin.estimate.work import Access, Argument, KernelStep, Number, Pointer, Region, Work
from ort_cuda_plugin.gpus.constants import Constants

THREADS, BLOCKS = 256, 4096

# Each thread copies an element; adjacent threads read elements that are `stride` apart.
STRIDED = """
def kernel(x, y, stride):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y[i] = x[i * stride]
"""
# The lanes of a warp read a row and a column of a tile in shared memory with `width` elements from row to row.
BANKS = """
def kernel(y, width):
    tile = cuda.shared.array(2112, float32)
    for i in range(cuda.threadIdx.x, 2112, 256):
        tile[i] = float32(i)
    cuda.syncthreads()
    row, column = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    y[cuda.blockIdx.x * 256 + cuda.threadIdx.x] = tile[row * width + column] + tile[column * width + row]
"""
# Each thread sums elements, four adjacent ones per round.
SUM = """
def kernel(x, y, rounds):
    total = float32(0)
    at = (cuda.blockIdx.x * rounds * cuda.blockDim.x + cuda.threadIdx.x) * 4
    for _ in range(rounds):
        total += (x[at] + x[at + 1]) + (x[at + 2] + x[at + 3])
        at += cuda.blockDim.x * 4
    y[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = total
"""
# In each warp, one lane sums all elements (`alone`), or each lane sums its part.
LANES = """
def kernel(x, y, alone):
    lane = cuda.threadIdx.x % 32
    total = float32(0)
    if alone == 0 or lane == 0:
        for i in range(lane, 1024, 32 if alone == 0 else 1):
            total += x[i]
    y[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = total
"""
# Each thread stores float16 sums in an array with a dynamic index, which a GPU's compiler may keep in registers.
HALVES = """
def kernel(x, y, n):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    own = cuda.local.array(16, uint16)
    for j in range(16):
        own[(j * n) & 15] = f32_to_f16(f16_to_f32(x[i + j]) + f16_to_f32(x[i]))
    y[i] = own[i & 15]
"""
# In each step, each thread starts a copy of 16 bytes to shared memory, AHEAD steps before it reads from it.
COPIES = """
def kernel(x, y, steps):
    tile = array_pointer(cuda.shared.array(3 * 1024, float32, 16))
    thread = cuda.threadIdx.x
    total = float32(0)
    for step in range(-AHEAD, steps):
        if step >= 0:
            copy_async_wait(AHEAD - 1)
        if step + AHEAD < steps:
            at = shared_address(tile) + int64(((step + 3) % 3 * 256 + thread) * 16)
            copy_async(at, x, ((step + AHEAD) * 256 + thread) * 4)
        copy_async_commit()
        if step >= 0:
            total += tile[int64((step % 3 * 256 + thread) * 4)]
    y[thread] = total
"""


@cache
def spec(name: str) -> KernelSpec:
    source, signature = {
        "strided": (STRIDED, ("*f32", "*f32", "i64")),
        "banks": (BANKS, ("*f32", "i64")),
        "sum": (SUM, ("*f32", "*f32", "i64")),
        "lanes": (LANES, ("*f32", "*f32", "i64")),
        "halves": (HALVES, ("*f16", "*f16", "i64")),
        **{f"copies{n}": (COPIES.replace("AHEAD", str(n)), ("*f32", "*f32", "i64")) for n in (1, 2)},
    }[name]
    return kernel(name, signature, source, launch_bounds=THREADS)


def work(name: str, sizes: list[int], number: int, blocks: int = BLOCKS) -> Work:
    """Return a launch whose arguments are arrays of ``sizes`` floats, the last one being the output, and ``number``."""
    kinds = ["input"] * (len(sizes) - 1) + ["output"]
    regions = tuple(Region(kind, str(i), 4 * size) for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)))
    accesses = [Access(i, 0, region.nbytes) for i, region in enumerate(regions)]
    arguments: tuple[Argument, ...] = (*(Pointer(i) for i in range(len(sizes))), Number("i64", number))
    memory = (tuple(accesses[:-1]), (accesses[-1],))
    step = KernelStep((name,), *memory, spec(name), (blocks, 1, 1), (THREADS, 1, 1), 0, arguments)
    return Work(regions, (step,))


def counted(of: Work, code: sass.Code | None = None) -> Counted:
    step = of.steps[0]
    assert isinstance(step, KernelStep)
    return count_all(of, {step.kernel: code or sass.Code(32, 0, 0, {}, 1.0)})[0]


def site(found: Counted, kind: str, number: int = 0) -> count.Site:
    return [site for site in found.sites if site.kind == kind][number]


def test_neighbors_share_sectors_and_strides_waste_them() -> None:
    elements = BLOCKS * THREADS
    dense = counted(work("strided", [elements, elements], 1))
    assert (site(dense, "load").units, site(dense, "store").units) == (4, 4)
    assert dense.read == dense.written == pytest.approx(4 * elements)
    apart = counted(work("strided", [8 * elements, elements], 8))
    assert (site(apart, "load").units, site(apart, "load").least) == (32, 4)
    assert apart.read == pytest.approx(32 * elements)
    assert apart.requests == dense.requests == pytest.approx(2 * elements / 32)
    assert apart.wavefronts > dense.wavefronts


def test_columns_of_shared_memory_conflict_unless_rows_are_shifted() -> None:
    for width, conflicts in ((32, 32), (33, 1)):
        found = counted(work("banks", [BLOCKS * THREADS], width))
        worst = max(site.units for site in found.sites if site.kind == "shared load")
        assert worst == conflicts
        assert found.instructions["barriers"] == pytest.approx(BLOCKS * THREADS)


def test_neighboring_loads_are_one_where_the_gpu_has_one() -> None:
    of = work("sum", [BLOCKS * THREADS * 64, BLOCKS * THREADS], 16)
    apart, joined = counted(of), counted(of, sass.Code(32, 0, 0, {"LDG.128": 1, "STG": 1}, 1.0))
    assert site(apart, "load").units == 16
    assert (site(joined, "load").nbytes, site(joined, "load").units, site(joined, "load").least) == (16, 16, 16)
    assert apart.requests == pytest.approx(4 * joined.requests, rel=0.05)
    # The L1 serves a block's repeated reads of the same bytes.
    assert apart.read == pytest.approx(joined.read) == pytest.approx(4 * BLOCKS * THREADS * 64)


def test_turns_beyond_those_that_are_noted_are_in_proportion() -> None:
    short, long = (counted(work("sum", [BLOCKS * THREADS * 4 * n, BLOCKS * THREADS], n)) for n in (16, 160))
    assert long.read == pytest.approx(10 * short.read)
    assert long.instructions["issued"] == pytest.approx(10 * short.instructions["issued"], rel=0.2)


def test_lanes_that_wait_for_others_take_as_long_as_these() -> None:
    shared, alone = (counted(work("lanes", [1024, 256], number, 1)) for number in (0, 1))
    assert alone.instructions["float"] >= 20 * shared.instructions["float"]


def test_arrays_of_a_thread_cost_nothing_where_they_are_registers() -> None:
    of = work("halves", [THREADS * 2, THREADS], 3, 1)
    in_memory, in_registers = (counted(of, sass.Code(32, 0, 0, {name: 1}, 1.0)) for name in ("LDL", "LDG"))
    difference = (in_memory.instructions["issued"] - in_registers.instructions["issued"]) / THREADS
    assert 32 <= difference <= 3 * 17  # 16 indices and stores, and a load
    # Sums in float16 need no conversions to float32 and back.
    assert not in_memory.instructions["special"]
    assert in_memory.instructions["float"] / THREADS == pytest.approx(16)


def test_a_quotient_has_four_instructions() -> None:
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    specs = []
    for number in (4, 8):
        names = [f"d{k}" for k in range(number)]
        lines = "".join(f"    q = quotient_i32(q, {name})\n" for name in names)
        source = f"def kernel(x, y, {', '.join(names)}):\n    q = x[0]\n{lines}    y[0] = q\n"
        specs.append(kernel("products", ("*i32", "*i32", *["i64"] * number), source))
    few, many = (sum(code.mix.values()) for code in sass.code_of(specs, Target.cuda(9, 0)))
    # Each quotient also loads its divisor, a parameter.
    assert (many - few) / 4 == pytest.approx(4 + 1, abs=1)
    assert instructions("  %q = call i32 @ptx.quotient(i32 %m, i64 %n)") == {"issued": 4}


def test_an_opaque_number_is_no_instruction() -> None:
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    specs = []
    for number in (0, 8):
        lines = "".join(f"    q = opaque_i32(q) ^ d{k & 1}\n" for k in range(8))
        source = f"def kernel(x, y, d0, d1):\n    q = x[0]\n{lines if number else lines.replace('opaque_i32', 'int32')}"
        specs.append(kernel("opaque", ("*i32", "*i32", "i32", "i32"), f"{source}    y[0] = q\n"))
    folded, kept = (code.mix for code in sass.code_of(specs, Target.cuda(9, 0)))
    assert kept.get("MOV", 0) <= folded.get("MOV", 0) + 1
    assert sum(kept.values()) <= sum(folded.values()) + 8
    assert not instructions("  %q = call i32 @ptx.opaque.i32(i32 %m)")


def test_a_choice_of_numbers_is_an_instruction_and_one_of_predicates_is_none() -> None:
    assert instructions("  %n = select i1 %c, i32 %a, i32 %b") == {"issued": 1}
    assert instructions("  %n = select i1 %c, i64 %a, i64 %b") == {"issued": 2}
    assert not instructions("  %n = select i1 %c, i1 %a, i1 false")


def test_places_of_a_thread_count_where_they_are_used() -> None:
    """Numba reads the thread indices of all three dimensions, also those that the kernel does not use."""
    issued = []
    for place in ("0", "cuda.threadIdx.x", "cuda.threadIdx.x ^ cuda.threadIdx.y"):
        spec = kernel("places", ("*i32",), f"def kernel(x):\n    x[0] = {place}\n")
        found = compile_kernel(spec, Target.counted()).metadata
        issued.append(sum(found[f"part{part}.issued"] for part in range(found["parts"])))
    assert issued[1:] == [issued[0] + 1, issued[0] + 3]


def test_the_larger_of_two_floats_is_one_instruction() -> None:
    source = "def kernel(x, y):\n    i = cuda.threadIdx.x\n    y[i] = fmax_f32(x[i], x[i + 1])\n"
    (code,) = sass.code_of([kernel("larger", ("*f32", "*f32"), source)], Target.cuda(9, 0))
    assert code.mix.get("FMNMX", 1) == 1
    assert instructions("  %m = tail call float @__nv_fmaxf(float %a, float %b)") == {"issued": 1, "float": 1}


def test_a_constant_beside_the_address_of_an_access_is_free() -> None:
    specs = []
    for number in (1, 4):
        loads = "".join(
            f"    a, b, c, d = load_matrices(at + {512 * i})\n    total = total ^ a ^ b ^ c ^ d\n"
            for i in range(number)
        )
        head = "    at = shared_address(array_pointer(cuda.shared.array(1024, float32, 16)))\n    total = uint32(0)\n"
        specs.append(kernel("loads", ("*u32",), f"def kernel(y):\n{head}{loads}    y[0] = total\n"))
    one, four = sass.code_of(specs, Target.cuda(9, 0))
    if sass.disassembler() is not None:
        adds = [sum(code.mix.get(name, 0) for name in ("IADD3", "VIADD", "IMAD", "LEA")) for code in (one, four)]
        assert (four.mix["LDSM"], adds[1]) == (4, adds[0])
    body = ["  %b = add i64 %a, 512", "  %p = inttoptr i64 %b to ptr", "  %c = add i64 %a, 512"]
    assert metadata("\n".join(add_counts(body, lambda _: 2, lambda _: "i16")))["part0.issued"] == 2


def test_clearing_an_array_of_a_thread_is_no_call() -> None:
    clear = "  call void @llvm.memset.p0.i64(ptr nonnull align 2 dereferenceable(16) %a, i8 0, i64 16, i1 false)"
    body = ["  %a = alloca [8 x i16], align 2", clear, "  %s = add i32 %k, %k"]
    found = metadata("\n".join(add_counts(body, lambda _: 2, lambda _: "i16")))
    assert (found["accesses"], found["part0.issued"]) == (0, 1)


def test_sampled_blocks_stand_for_all() -> None:
    for blocks in (1, 5, 6, 7, 1000):
        chosen, weights = count.sample(blocks)
        assert len(chosen) == len(set(chosen.tolist())) == len(weights)
        assert chosen.max() == blocks - 1
        assert weights.sum() == pytest.approx(blocks)


@pytest.mark.parametrize(("name", "sizes"), [("strided", [64, 64]), ("banks", [64])])
def test_blocks_that_take_numbers_for_far_places_end_there(
    name: str, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    counted(work(name, sizes, 1 << 50, blocks=1))
    assert f"kernel {name}: 1 of 1 sampled blocks are counted incompletely" in caplog.text


@pytest.mark.parametrize(
    ("device", "name", "measured"),
    [
        # CUB's transforms of 128 bits an element: https://github.com/NVIDIA/cccl/pull/9881
        ("rtx5090", "strided", 0.878),
        # CUB's sum of 2**28 integers, 249.3 us: https://github.com/NVIDIA/cccl/pull/9722
        ("h200", "sum", 0.897),
    ],
)
def test_copies_and_sums_of_large_arrays_take_what_was_published(device: str, name: str, measured: float) -> None:
    gpu = gpus.gpu(device)
    blocks = 1 << 17
    elements = blocks * THREADS
    of = work(name, [elements * (64 if name == "sum" else 1), elements], 16 if name == "sum" else 1, blocks)
    found = estimate(of, gpu)
    moved = sum(region.nbytes for region in of.regions)
    assert found.steps[0].bound == "dram"
    assert moved / found.seconds / gpu.dram == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("device", "small", "large"),
    [
        # Microseconds of a kernel in a CUDA graph, for numbers of doubles that it copies from L2 to L2:
        # https://github.com/te42kyfo/gpu-benches/tree/master/gpu-small-kernels
        ("h200", (256017, 1.67), (2085772, 6.60)),
        ("a100", (261002, 2.56), (1042953, 5.66)),
    ],
)
def test_copies_in_the_l2_take_what_was_published(
    device: str, small: tuple[int, float], large: tuple[int, float]
) -> None:
    seconds = []
    (fewer, less), (more, longer) = small, large
    for doubles in (fewer, more):
        blocks = -(-doubles * 2 // THREADS)
        elements = blocks * THREADS
        seconds.append(estimate(work("strided", [elements, elements], 1, blocks), gpus.gpu(device)).seconds)
    assert seconds[1] - seconds[0] == pytest.approx((longer - less) * 1e-6, rel=0.15)


def test_a_kernel_of_a_graph_takes_what_was_published() -> None:
    found = estimate(work("strided", [8192, 8192], 1, 8192 // THREADS), gpus.gpu("h200")).seconds
    # gpu-benches publishes 1.26 and 2.26 us for 4096 doubles, with two versions of the driver.
    assert 1.26e-6 < found < 2.26e-6


def test_few_blocks_leave_a_gpu_waiting() -> None:
    h100, constants = gpus.gpu("h100"), Constants()
    seconds = []
    for blocks in (4, BLOCKS):
        of = work("sum", [blocks * THREADS * 64, blocks * THREADS], 16, blocks)
        step = of.steps[0]
        assert isinstance(step, KernelStep)
        (code,) = sass.code_of([step.kernel], Target.cuda(9, 0))
        parts, fits = kernel_seconds(step, counted(of, code), code, h100, constants, 4 * blocks * THREADS * 65)
        assert fits.warps <= h100.max_warps
        seconds.append(max(parts.values()))
        assert (max(parts, key=lambda name: parts[name]) == "waiting") == (blocks == 4)
    assert seconds[1] < 100 * seconds[0]


@pytest.mark.parametrize("ahead", [1, 2])
def test_copies_ahead_are_waited_for_as_little_as_littles_law_says(ahead: int) -> None:
    steps, h100 = 160, gpus.gpu("h100")
    of = work(f"copies{ahead}", [steps * 1024, THREADS], steps, 1)
    found = counted(of)
    (wait,) = found.copy_waits
    assert (wait.left, wait.times, found.loads) == (ahead - 1, steps, 0)
    step = of.steps[0]
    assert isinstance(step, KernelStep)
    latency = 1e-3  # far longer than the work that could hide it
    slow = Constants(l2_latency=latency, dram_latency=latency)
    parts, _ = kernel_seconds(step, found, sass.Code(32, 0, 0, {"LDGSTS": 1}, 1.0), h100, slow, 0.0)
    assert parts["waiting"] == pytest.approx(latency + (steps - 1) * latency / ahead, rel=0.01)
    # If a step takes longer than a copy, threads wait only for the first copy.
    fast = Constants(l2_latency=wait.issued / h100.clock, dram_latency=0.0)
    none = Constants(l2_latency=0.0, dram_latency=0.0)
    hidden, chain = (
        kernel_seconds(step, found, sass.Code(32, 0, 0, {"LDGSTS": 1}, 1.0), h100, constants, 0.0)[0]["waiting"]
        for constants in (fast, none)
    )
    assert hidden - chain == pytest.approx(fast.l2_latency)


def test_code_is_read_of_the_disassembly() -> None:
    text = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0020*/                   FADD R12, R4, R8 ;
        /*0030*/              @!P0 LDG.E R6, desc[UR4][R12.64] ;
        /*0040*/                   HMMA.16816.F32 R16, R4, R6, R16 ;
        /*0050*/                   STS.64 [R0], R16 ;
        /*0060*/                   NOP ;
    """
    assert sass.mix_of(text) == {"LDG.128": 2, "FADD": 1, "LDG": 1, "HMMA": 1, "STS.64": 1}
    assert sass.rounds_of(text) == pytest.approx(2 / 3)
    code = sass.Code(32, 0, 0, sass.mix_of(text), 1.0)
    assert code.uses_tensor_cores
    assert (code.widest("LDG"), code.widest("STS"), code.widest("STG")) == (16, 8, 4)


@pytest.mark.skipif(sass.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed")
def test_nvdisasm_reads_what_we_compile() -> None:
    (image,) = KernelLibrary(count=lambda name, by: None).get_many([spec("sum")], Target.cuda(9, 0))
    mix = sass.mix_of(sass.disassembled(image))
    assert sum(count for name, count in mix.items() if name.startswith("LDG")) >= 4
    assert mix["EXIT"] >= 1
