"""Custom kernels in Numba, CUDA C++, PTX, cubin or LTO-IR, and their counterparts for the emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numba import cuda

import ort_cuda_plugin
from custom_models import in_place_of, launches, model, random_rows
from ort_cuda_plugin.compiler import compile as compiler
from ort_cuda_plugin.compiler.compile import KernelCompileError, compile_kernel
from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.library import compile_worker
from ort_cuda_plugin.compiler.library.foreign_code import compile_for
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.custom.kernels.kernel_source import KernelSourceError
from ort_cuda_plugin.custom.kernels.kernels import (
    Kernel,
    cubin_kernel,
    cuda_kernel,
    launch,
    ltoir_kernel,
    numba_kernel,
    ptx_kernel,
)
from ort_cuda_plugin.ep.device.devices import cuda_devices
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor

SIGNATURE = ("*f32", "*f32", "i64", "f32")
SHIFT = 3
PTX_HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
BROKEN = 'extern "C" __global__ void f() { int x = y; }'
SOURCE = """
template <typename T> __device__ T shifted(T x, T factor) { return x * factor + 3; }
extern "C" __global__ void shift(const float *x, float *y, long long n, float factor) {
  extern __shared__ float in_launch[];
  __shared__ float fixed[64];
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  fixed[threadIdx.x] = i < n ? x[i] : 0;
  __syncthreads();
  if (i < n) y[i] = shifted(fixed[threadIdx.x], factor);
  if (n < 0) y[0] = in_launch[0];
}
template <typename T> __global__ void zero(T *x) { *x = 0; }
"""


def shift(x: Any, y: Any, n: int, factor: float) -> None:
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] * factor + SHIFT


def shift_in_numpy(x: np.ndarray, y: np.ndarray, n: int, factor: float) -> None:
    assert x.size == n
    y[...] = x * np.float32(factor) + np.float32(3)


def image(kernel: Kernel, capability: tuple[int, int] = (9, 0)) -> KernelImage:
    assert kernel.signature is not None
    return compile_kernel(kernel.spec(kernel.signature, 64), Target.cuda(*capability))


@pytest.fixture(scope="module")
def made() -> dict[str, KernelImage]:
    """Return SOURCE compiled to a cubin for sm_90, with its PTX."""
    return {"sm_90": image(cuda_kernel(SOURCE, "shift", SIGNATURE))}


# ---- code for GPUs, compiled without a GPU ----


def test_cuda_cpp_becomes_a_cubin_that_says_what_it_needs(made: dict[str, KernelImage]) -> None:
    cubin = made["sm_90"]
    assert (cubin.entry, cubin.data[:4]) == ("shift", b"\x7fELF")
    assert 256 <= cubin.metadata["static_shared_bytes"] < 48 << 10
    assert cubin.metadata["registers"] > 0
    assert b".visible .entry shift" in cubin.ptx


def test_an_expression_names_an_instance_of_a_template() -> None:
    assert image(cuda_kernel(SOURCE, "zero<float>", ("*f32",))).entry == "_Z4zeroIfEvPT_"


def ltoir() -> bytes:
    """Return the source as LTO-IR for sm_90."""
    from cuda.bindings import nvrtc

    program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"shift.cu", 0, [], [])[1]
    options = [b"--gpu-architecture=compute_90", b"-dlto"]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == 0
    data: bytes = b" " * nvrtc.nvrtcGetLTOIRSize(program)[1]
    nvrtc.nvrtcGetLTOIR(program, data)
    return data


def test_ptx_and_ltoir_are_linked(made: dict[str, KernelImage]) -> None:
    for kernel in (
        ptx_kernel(made["sm_90"].ptx, "shift", SIGNATURE),
        ptx_kernel(made["sm_90"].ptx.decode(), "shift", SIGNATURE),
        ltoir_kernel({"sm_90": ltoir()}, "shift", SIGNATURE),
    ):
        assert image(kernel).metadata["static_shared_bytes"] == made["sm_90"].metadata["static_shared_bytes"]


def test_a_cubin_is_taken_for_its_architecture_and_later_ones_of_the_family(made: dict[str, KernelImage]) -> None:
    cubin = made["sm_90"].data
    older, newer = cubin + b" of sm_80", cubin + b" of sm_86"
    kernel = cubin_kernel({"sm_80": older, "sm_86": newer, "sm_90": cubin}, "shift", SIGNATURE)
    assert kernel.foreign is not None
    found = [kernel.foreign.image_for(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0))]
    assert found == [older, newer, cubin, None]
    assert image(kernel).data == cubin
    with pytest.raises(KernelCompileError, match=r"is for sm_80, sm_86, sm_90, none of which runs on sm_100: add code"):
        image(kernel, (10, 0))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (cuda_kernel(BROKEN, "f", ()), r'NVRTC does not compile the code: f.cu\(1\): error: identifier "y"'),
        (cuda_kernel('extern "C" __global__ void f() {}', "g", ()), "NVRTC does not compile the code: .*g"),
        (
            cuda_kernel(SOURCE, "shift", SIGNATURE, options=["--no-such-option"]),
            "NVRTC does not compile the code: .*no-such-option",
        ),
        (ptx_kernel(".version 8.0", "f", ()), "nvJitLink does not read the code: "),
    ],
)
def test_code_that_does_not_compile_is_an_error_with_the_reason(kernel: Kernel, message: str) -> None:
    with pytest.raises(KernelCompileError, match=f"kernel '\\w+': {message}"):
        image(kernel)


@pytest.mark.parametrize("signature", [("*f32", "*f32", "i32", "f32"), SIGNATURE[:2], (*SIGNATURE, "i64")])
def test_code_with_other_parameters_is_an_error(made: dict[str, KernelImage], signature: Sequence[str]) -> None:
    """With a wrong signature, a launch would read beyond its arguments, or read only a part of one."""
    message = r"the parameters in the code have \[8, 8, 8, 4\] bytes, those of the declared signature \[8, 8"
    for kernel in (
        cuda_kernel(SOURCE, "shift", signature),
        cubin_kernel({"sm_90": made["sm_90"].data}, "shift", signature),
    ):
        with pytest.raises(KernelCompileError, match=message):
            image(kernel)


def test_cuda_cpp_finds_the_headers_of_cuda() -> None:
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void f(__half *x) { x[0] = __hadd(x[0], x[1]); }'
    assert image(cuda_kernel(source, "f", ("*f16",))).data[:4] == b"\x7fELF"


def test_code_without_its_entry_is_an_error_with_the_entries(made: dict[str, KernelImage]) -> None:
    with pytest.raises(KernelCompileError, match=r"the code has no kernel 'move'\. Kernels in the code: shift"):
        image(ptx_kernel(made["sm_90"].ptx, "move", SIGNATURE))


def test_without_nvrtc_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings

    monkeypatch.delattr(cuda.bindings, "nvrtc", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(KernelCompileError, match=r"NVRTC, which compiles CUDA C.*ort-cuda-plugin.nvrtc."):
        image(cuda_kernel(SOURCE, "shift", SIGNATURE))


def test_a_kernel_travels_to_a_helper_process_and_its_digest_has_all_of_it() -> None:
    spec = cuda_kernel(SOURCE, "shift", SIGNATURE, options=["--use_fast_math"], numba_twin=shift).spec(SIGNATURE, 64)
    job = spec, Target.cuda(9, 0)
    assert compile_worker.decode_job(compile_worker.encode_job(*job)) == job
    others = [
        cuda_kernel(SOURCE + " ", "shift", SIGNATURE, options=["--use_fast_math"], numba_twin=shift),
        cuda_kernel(SOURCE, "shift", SIGNATURE, numba_twin=shift),
        cuda_kernel(SOURCE, "shift", SIGNATURE, options=["--use_fast_math"]),
        cuda_kernel(SOURCE, "zero<int>", SIGNATURE, options=["--use_fast_math"], numba_twin=shift),
    ]
    assert len({spec.digest, *(other.spec(SIGNATURE, 64).digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (cubin_kernel, ({"sm90": b""}, "f", ()), "'sm90' is not an architecture"),
        (cubin_kernel, ({"": b""}, "f", ()), "a cubin is for one architecture"),
        (cubin_kernel, ({}, "f", ()), "got no code, expected code for at least one architecture"),
        (cubin_kernel, ({"sm_90": "text"}, "f", ()), "kernel f: the code for sm_90 has type str, expected bytes"),
        (cubin_kernel, ({"sm_90": b"no cubin"}, "f", ()), "kernel f: the image for sm_90 is not a cubin: not a 64-bit"),
        (ptx_kernel, ("", "f", ("*f31",)), r"'\*f31' in the signature is not a parameter type"),
    ],
)
def test_what_cannot_be_a_kernel_is_refused(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)


def test_a_cubin_has_its_entry_and_is_not_shown_in_messages(made: dict[str, KernelImage]) -> None:
    cubin = made["sm_90"].data
    with pytest.raises(ValueError, match=r"kernel move: the code has no kernel 'move'\. Kernels in the code: shift"):
        cubin_kernel({"sm_90": cubin}, "move", SIGNATURE)
    assert "ELF" not in repr(cubin_kernel({"sm_90": cubin}, "shift", SIGNATURE))


# ---- source text of Numba kernels ----


def test_a_twin_has_the_parameters_of_its_kernel() -> None:
    with pytest.raises(
        KernelSourceError, match="kernel zero<int>: its counterpart in Numba has 4 parameters, expected 1"
    ):
        cuda_kernel(SOURCE, "zero<int>", ("*i32",), numba_twin=shift)


# ---- in sessions ----


def changes(session: Any, rows: int) -> dict[str, int]:
    """Run once and compare; return the changes of the counters."""
    x = random_rows(rows)
    before = ort_cuda_plugin.counters()
    (y,) = session.run(None, {"x": x})
    after = ort_cuda_plugin.counters()
    np.testing.assert_allclose(y, -(2 * np.exp(x) + 3), rtol=1e-5)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.mark.parametrize("kernel", [numba_kernel(shift), cuda_kernel(SOURCE, "shift", SIGNATURE, numba_twin=shift)])
def test_a_steady_run_with_a_kernel_calls_no_python_and_becomes_a_graph(kernel: Kernel) -> None:
    with in_place_of("Sign", launches(kernel)):
        session = ort_cuda_plugin.session(model(), emulate=True)
        assert changes(session, 3)["launches"] == 3
        for rows in (40, 5, 5, 5, 5):
            counted = changes(session, rows)
            assert "python_calls" not in counted, "the launch follows the sizes"
        assert counted["graph_replays"] == 1


def test_a_twin_in_numpy_is_called_in_each_run_and_explain_says_so() -> None:
    kernel = cuda_kernel(SOURCE, "shift", SIGNATURE, numpy_twin=shift_in_numpy)
    with in_place_of("Sign", launches(kernel)):
        verdict = ort_cuda_plugin.explain(model(), emulate=True)[1]
        assert "each Run calls the NumPy counterpart of kernel shift in Python" in verdict.note
        session = ort_cuda_plugin.session(model(), emulate=True)
        changes(session, 2)
        assert changes(session, 0).get("python_calls") == 1
        assert changes(session, 7)["python_calls"] == 1


@pytest.mark.parametrize("kind", ["cuda", "ptx", "ltoir"])
def test_the_emulated_device_executes_foreign_code(made: dict[str, KernelImage], kind: str) -> None:
    kernel = {
        "cuda": lambda: cuda_kernel(SOURCE, "shift", SIGNATURE),
        "ptx": lambda: ptx_kernel(made["sm_90"].ptx, "shift", SIGNATURE),
        "ltoir": lambda: ltoir_kernel({"sm_90": ltoir()}, "shift", SIGNATURE),
    }[kind]()
    x = random_rows(70)
    with in_place_of("Sign", launches(kernel)):
        result = ort_cuda_plugin.session(model(), emulate=True).run(None, {"x": x})[0]
    np.testing.assert_allclose(result, -(np.exp(x) * 2 + SHIFT), rtol=1e-5)


def test_a_cubin_alone_is_for_gpus_only(made: dict[str, KernelImage]) -> None:
    kernel = cubin_kernel({"sm_90": made["sm_90"].data}, "shift", SIGNATURE)
    with in_place_of("Sign", launches(kernel)):
        assert ort_cuda_plugin.explain(model(), emulate=True)[1].note == "", "the built-in operator runs the node"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cuda_kernel(BROKEN, "f", SIGNATURE), 'identifier "y" is undefined'),
        (
            lambda: cuda_kernel(SOURCE, "zero<int>", SIGNATURE),
            r"the parameters in the code have \[8\] bytes, those of the " r"declared",
        ),
        (lambda: ptx_kernel(PTX_HEAD + ".visible .entry g() { ret; }", "f", ()), "the code has no kernel 'f'"),
        (
            lambda: ptx_kernel(PTX_HEAD + ".visible .entry f() { wgmma.fence.sync.aligned; ret; }", "f", ()),
            "PTX line 4, `wgmma.fence.sync.aligned`: the instruction wgmma is not supported",
        ),
    ],
)
def test_code_that_the_emulated_device_cannot_execute_is_an_error(make: Any, message: str) -> None:
    kernel: Kernel = make()
    with pytest.raises(KernelCompileError, match=message):
        compile_for(compiler, kernel.spec(kernel.signature or (), 64), Target.emulated(), None)


def test_a_block_that_depends_on_a_size_makes_a_plan_for_each() -> None:
    def function(ctx: Lowering, inputs: Sequence[Tensor | None], _: object) -> list[Tensor]:
        x = inputs[0]
        assert x is not None
        y = ctx.empty(x.shape, x.dtype)
        rows = x.shape[0]
        launch(ctx, numba_kernel(shift), 4, rows, [ctx.contiguous(x), y, x.size, 2.0], writes=[y])
        return [y]

    with in_place_of("Sign", function):
        session = ort_cuda_plugin.session(model(), emulate=True)
        built = [changes(session, rows).get("plan_variants_built", 0) for rows in (3, 5, 3)]
        assert built == [1, 1, 0]


def wrong_launches() -> dict[str, Any]:
    kernel = cuda_kernel(SOURCE, "shift", SIGNATURE, numba_twin=shift)

    def with_arguments(*args: Any, block: Any = 64) -> Any:
        def function(ctx: Lowering, inputs: Sequence[Tensor | None], _: object) -> list[Tensor]:
            x = inputs[0]
            assert x is not None
            y = ctx.empty(x.shape, x.dtype)
            places: dict[str, Any] = {"x": x, "y": y, "n": x.size, "flipped": ctx.view(x, (4, x.shape[0]), (1, 4))}
            launch(ctx, kernel, 1, block, [places.get(a, a) if isinstance(a, str) else a for a in args], writes=[y])
            return [y]

        return function

    return {
        "takes 4 arguments, got 3": with_arguments("x", "y", "n"),
        r"argument 3: got a symbolic size, expected f32 as the signature declares": with_arguments("x", "y", "n", "n"),
        r"argument 1: got the type f32, expected \*f32 as the signature declares": with_arguments("x", 1.5, "n", 2.0),
        "argument 0 is not contiguous. Pass ctx.contiguous": with_arguments("flipped", "y", "n", 2.0),
        "argument 2: got str, expected a tensor or a number": with_arguments("x", "y", "nothing", 2.0),
        r"a block of \(64, 64, 1\) threads": with_arguments("x", "y", "n", 2.0, block=(64, 64)),
    }


@pytest.mark.parametrize("message", wrong_launches())
def test_a_wrong_launch_is_an_error_with_the_argument(message: str) -> None:
    from ort_cuda_plugin.model.ir import DType
    from ort_cuda_plugin.program.expressions.symbolic import symbol
    from ort_cuda_plugin.program.lowering.context import Buffer, BufferKind, DeviceProperties

    ctx = Lowering(DeviceProperties())
    n = symbol(0, "n", 3, 0, None)
    x = Tensor(DType.FLOAT32, (n, 4), Buffer(BufferKind.INPUT, n * 16, index=0))
    with pytest.raises(TypeError, match=message):
        wrong_launches()[message](ctx, [x], {})


@pytest.mark.gpu
def test_code_for_gpus_does_what_its_twin_does() -> None:
    if not cuda_devices()[0]:
        pytest.skip("no CUDA device")
    x = random_rows(1000)
    results = []
    for kernel in (cuda_kernel(SOURCE, "shift", SIGNATURE), numba_kernel(shift)):
        with in_place_of("Sign", launches(kernel)):
            session = ort_cuda_plugin.session(model(), emulate=False)
            results.append(session.run(None, {"x": x})[0])
    np.testing.assert_array_equal(*results)


def test_foreign_kernels_are_kernels() -> None:
    spec = cuda_kernel(SOURCE, "shift", SIGNATURE).spec(SIGNATURE, 64)
    assert isinstance(spec, ForeignKernel)
