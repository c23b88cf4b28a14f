"""Replacements for NVVM intrinsics and inline PTX on the emulated device, as LLVM IR."""

from __future__ import annotations

from ort_cuda_plugin.compiler.host import counts, matrices
from ort_cuda_plugin.compiler.host.vector_math import exp

QUOTIENT = (
    "{ .reg .u32 l, h, n, t; mov.b64 {l, h}, $2; mad.lo.u32 n, $1, 2, 2; mul.hi.u32 t, n, l;"
    " mad.lo.cc.u32 l, n, h, t; madc.hi.u32 $0, n, h, 0; }"
)
"""Inline PTX for integer division by a precomputed 64-bit reciprocal.

The quotient is the upper 32 of the 96 bits of (2 x + 2) * reciprocal. ptxas needs two multiplications and no addition.
"""
register_values = {
    **{
        f"nvvm.read.ptx.sreg.{kind}.{axis}": f"%ocp.{kind}.{axis}"
        for kind in ("tid", "ntid", "ctaid", "nctaid")
        for axis in "xyz"
    },
    "nvvm.read.ptx.sreg.laneid": "%ocp.laneid",
    "nvvm.read.ptx.sreg.warpsize": "32",
    "ptx.dynamic_smem_size": "%ocp.dynamic_shared",
}
fences = {"nvvm.membar.cta", "nvvm.membar.gl", "nvvm.membar.sys"}
atomics = {
    "nvvm.atomic.load.add.f32.p0f32": ("fadd", 4),
    "nvvm.atomic.load.add.f64.p0f64": ("fadd", 8),
    "nvvm.atomic.load.inc.32.p0i32": ("uinc_wrap", 4),
    "nvvm.atomic.load.dec.32.p0i32": ("udec_wrap", 4),
    "___numba_atomic_double_add": ("fadd", 8),
    "___numba_atomic_float_sub": ("fsub", 4),
    "___numba_atomic_double_sub": ("fsub", 8),
    "___numba_atomic_u64_inc": ("uinc_wrap", 8),
    "___numba_atomic_u64_dec": ("udec_wrap", 8),
    **{
        f"___numba_atomic_{ty}_{nan}{function}": (f"f{function}", size)
        for ty, size in (("float", 4), ("double", 8))
        for nan in ("", "nan")
        for function in ("min", "max")
    },
}
# Calls that let other threads of the block run, so that each thread needs a fiber. {} stands for the call's arguments.
switching_calls = {
    "nvvm.barrier0": "call void @ocp_emu_barrier(ptr %ocp.thread)",
    "nvvm.bar.warp.sync": "call void @ocp_emu_warp_barrier(ptr %ocp.thread, {})",
    "nvvm.shfl.sync.i32": "call {{i32, i1}} @ocp.shfl(ptr %ocp.thread, {})",
    "nvvm.vote.sync": "call {{i32, i1}} @ocp.vote(ptr %ocp.thread, {})",
    **matrices.SWITCHING_CALLS,
}
definitions = {
    **matrices.DEFINITIONS,
    "ocp.shfl": """
define internal {i32, i1} @ocp.shfl(ptr %thread, i32 %mask, i32 %mode, i32 %value, i32 %lane, i32 %clamp) alwaysinline {
  %predicate = alloca i32
  %v = call i32 @ocp_emu_shfl(ptr %thread, i32 %mask, i32 %mode, i32 %value, i32 %lane, i32 %clamp, ptr %predicate)
  %p = load i32, ptr %predicate
  %c = icmp ne i32 %p, 0
  %a = insertvalue {i32, i1} undef, i32 %v, 0
  %r = insertvalue {i32, i1} %a, i1 %c, 1
  ret {i32, i1} %r
}
""",
    "ocp.vote": """
define internal {i32, i1} @ocp.vote(ptr %thread, i32 %mask, i32 %mode, i1 %predicate) alwaysinline {
  %p = zext i1 %predicate to i32
  %v = call i32 @ocp_emu_vote(ptr %thread, i32 %mask, i32 %mode, i32 %p)
  %c = icmp ne i32 %v, 0
  %a = insertvalue {i32, i1} undef, i32 %v, 0
  %r = insertvalue {i32, i1} %a, i1 %c, 1
  ret {i32, i1} %r
}
""",
    "ptx.lanemask_lt": """
define internal i32 @ptx.lanemask_lt(i32 %lane) alwaysinline {
  %b = shl i32 1, %lane
  %r = sub i32 %b, 1
  ret i32 %r
}
""",
    "ptx.cvt.f32.f16": """
define internal float @ptx.cvt.f32.f16(i16 %x) alwaysinline {
  %h = bitcast i16 %x to half
  %r = fpext half %h to float
  ret float %r
}
""",
    "ptx.cvt.rn.f16.f32": """
define internal i16 @ptx.cvt.rn.f16.f32(float %x) alwaysinline {
  %h = fptrunc float %x to half
  %r = bitcast half %h to i16
  ret i16 %r
}
""",
    "ptx.cvt.rn.bf16.f32": """
define internal i16 @ptx.cvt.rn.bf16.f32(float %x) alwaysinline {
  %i = bitcast float %x to i32
  %high = lshr i32 %i, 16
  %odd = and i32 %high, 1
  %bias = add i32 %odd, 32767
  %rounded = add i32 %i, %bias
  %shifted = lshr i32 %rounded, 16
  %nan = fcmp uno float %x, %x
  %chosen = select i1 %nan, i32 32767, i32 %shifted
  %r = trunc i32 %chosen to i16
  ret i16 %r
}
""",
    "ptx.tanh.approx.f32": """
define internal float @ptx.tanh.approx.f32(float %x) alwaysinline {
  %r = call float @tanhf(float %x)
  ret float %r
}
""",
    "ptx.half_exp": exp("ptx.half_exp"),
    "ptx.half_exp2": """
define internal float @ptx.half_exp2(float %x) alwaysinline {
  %p = call float @exp2f(float %x)
  %tiny = fcmp olt float %p, 0x3810000000000000
  %r = select i1 %tiny, float 0.0, float %p
  ret float %r
}
""",
    "ptx.half_reciprocal": """
define internal float @ptx.half_reciprocal(float %x) alwaysinline {
  %r = fdiv float 1.0, %x
  ret float %r
}
""",
    **{
        f"ptx.opaque.{ty}": f"""
define internal {ty} @ptx.opaque.{ty}({ty} %x) alwaysinline {{
  %p = alloca {ty}
  store volatile {ty} %x, ptr %p
  %r = load volatile {ty}, ptr %p
  ret {ty} %r
}}
"""
        for ty in ("i32", "i64")
    },
    "ptx.quotient": """
define internal i32 @ptx.quotient(i32 %x, i64 %reciprocal) alwaysinline {
  %m = shl i32 %x, 1
  %even = add i32 %m, 2
  %n = zext i32 %even to i64
  %low = and i64 %reciprocal, 4294967295
  %high = lshr i64 %reciprocal, 32
  %a = mul i64 %n, %low
  %b = mul i64 %n, %high
  %carried = lshr i64 %a, 32
  %w = add i64 %b, %carried
  %q = lshr i64 %w, 32
  %r = trunc i64 %q to i32
  ret i32 %r
}
""",
    "ptx.load_acquire": """
define internal i32 @ptx.load_acquire(ptr %p) alwaysinline {
  %r = load atomic i32, ptr %p acquire, align 4
  ret i32 %r
}
""",
    # The thread waits for a block that another host thread runs, so let that host thread run.
    "ptx.nanosleep": """
define internal void @ptx.nanosleep(i32 %x) alwaysinline {
  %r = call i32 @sched_yield()
  ret void
}
""",
}
declarations = {
    "ocp_emu_barrier": "declare void @ocp_emu_barrier(ptr) nounwind",
    "ocp_emu_warp_barrier": "declare void @ocp_emu_warp_barrier(ptr, i32) nounwind",
    "ocp_emu_shfl": "declare i32 @ocp_emu_shfl(ptr, i32, i32, i32, i32, i32, ptr) nounwind",
    "ocp_emu_vote": "declare i32 @ocp_emu_vote(ptr, i32, i32, i32) nounwind",
    "cudaGraphSetConditional": "declare void @cudaGraphSetConditional(i64, i32) nounwind",
    "sched_yield": "declare i32 @sched_yield() nounwind",
    "ocp_emu_check_load": "declare void @ocp_emu_check_load(ptr, ptr, i32) nounwind",
    "ocp_emu_check_store": "declare void @ocp_emu_check_store(ptr, ptr, i32) nounwind",
    "ocp_emu_check_atomic": "declare void @ocp_emu_check_atomic(ptr, ptr, i32) nounwind",
    **counts.DECLARATIONS,
}
