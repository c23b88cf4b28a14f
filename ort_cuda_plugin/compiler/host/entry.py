"""Generates the entry point of a kernel on the emulated device, and the kernel's metadata constant, as LLVM IR text.

If no thread of a kernel waits for another one, the entry point loops over the threads of a block. The loops are marked
as parallel, so that LLVM can vectorize them. If all threads along x pass the bounds check at the start of the kernel, a
loop without the check runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class UnsupportedIR(Exception):
    """The kernel uses a feature that the emulated device lacks; the message names it."""


value_name = r'%(?:[-\w.$]+|"[^"]*")'
access_line = re.compile(
    rf"^\s*(?:{value_name} = )?(?:"
    r"load (?:atomic )?(?:volatile )?(?P<load>[^@%]+?), ptr (?P<load_ptr>[^,\s]+)"
    r"|store (?:atomic )?(?:volatile )?(?P<store>.+), ptr (?P<store_ptr>[^,\s]+)"
    r"|atomicrmw (?:volatile )?\w+ ptr (?P<rmw_ptr>[^,\s]+), (?P<rmw>\w+)"
    r"|cmpxchg (?:volatile )?ptr (?P<cas_ptr>[^,\s]+), (?P<cas>\w+))"
)
guard_branch = re.compile(
    rf"^\s*br i1 (?P<condition>{value_name}), label %(?P<then>[-\w.$]+), label %(?P<other>[-\w.$]+)"
)
terminator = re.compile(r"^\s*(?:br|ret|switch|unreachable|indirectbr)\b")
axes = "xyz"
thread_parameters = [
    *(f"i32 %ocp.{kind}.{axis}" for kind in ("tid", "ntid", "ctaid", "nctaid") for axis in axes),
    "i32 %ocp.laneid",
    "i32 %ocp.dynamic_shared",
    "ptr %ocp.shared",
    "ptr %ocp.thread",
]
# Numbers of metadata nodes, above those that LLVM assigns in a kernel.
access_group, parallel_loop, scalar_loop, block_range, grid_range = (f"!{1000000 + i}" for i in range(5))
metadata = f"""{access_group} = distinct !{{}}
{parallel_loop} = distinct !{{{parallel_loop}, !1000010}}
{scalar_loop} = distinct !{{{scalar_loop}, !1000011, !1000012}}
{block_range} = !{{i32 1, i32 1025}}
{grid_range} = !{{i32 1, i32 -2147483648}}
!1000010 = !{{!"llvm.loop.parallel_accesses", {access_group}}}
!1000011 = !{{!"llvm.loop.vectorize.enable", i1 false}}
!1000012 = !{{!"llvm.loop.unroll.disable"}}
"""


def kernel_functions(name: str, parameters: list[str], body: list[str], fibers: bool) -> str:
    """Return the function ``name`` with the signature of ``csrc_shim/emulator/kernel.h``, the functions that it
    inlines, and metadata.

    ``parameters`` are the kernel's, as ``<type> <name>``. ``body`` has the kernel's lines, in which special registers
    are the values ``%ocp.*`` of `thread_parameters`. ``fibers``: each thread has a fiber, since threads wait for each
    other.
    """
    if not fibers:
        body = [f"{line}, !llvm.access.group {access_group}" if access_line.match(line) else line for line in body]
    signature = ", ".join([*parameters, *thread_parameters])
    guard = None if fibers else leading_guard(body)
    functions = [function("void", "ocp.body", signature, body)]
    if guard:
        functions += [
            function("i1", "ocp.guard", signature, guard.condition),
            function("void", "ocp.inside", signature, guard.inside),
        ]
    return "\n".join([*functions, entry_point(name, parameters, fibers, guard is not None), metadata])


def function(result: str, name: str, signature: str, body: list[str]) -> str:
    return "\n".join([f"define internal {result} @{name}({signature}) alwaysinline nounwind {{", *body, "}"])


@dataclass(frozen=True)
class Guard:
    """The two parts of a kernel that begins with bounds checks, at which threads return if they fail.

    ``condition`` is a function body that returns whether a thread passes all checks; ``inside`` is the kernel's body
    without the checks.
    """

    condition: list[str]
    inside: list[str]


def leading_guard(body: list[str]) -> Guard | None:
    """Split the body of a kernel that begins with bounds checks; return None for other kernels.

    A bounds check is a basic block that only computes a condition, and from which the thread returns if the condition
    fails.
    """
    inside = list(body)
    condition: list[str] = []
    start = 0
    while True:
        end = next((i for i in range(start, len(body)) if terminator.match(body[i])), len(body))
        block = body[start:end]
        branch = guard_branch.match(body[end]) if end < len(body) else None
        if branch is None or not all(is_computation(line) for line in block):
            break
        targets = [branch["then"], branch["other"]]
        ends = [is_return(body, label) for label in targets]
        if ends[0] == ends[1]:
            break
        onward = targets[ends.index(False)]
        then, other = ("ocp.fails" if stops else onward for stops in ends)
        condition += [*block, f"  br i1 {branch['condition']}, label %{then}, label %{other}"]
        inside[end] = f"  br label %{onward}"
        start = next((i for i in range(end, len(body)) if body[i].startswith(f"{onward}:")), len(body))
        if sum(f"label %{onward}" in line for line in body) != 1:
            break
    if not condition:
        return None
    # `condition` branches to the block after the checks, `onward`; add this label with a block that returns true.
    return Guard([*condition, f"{onward}:", "  ret i1 true", "ocp.fails:", "  ret i1 false"], inside)


def is_computation(line: str) -> bool:
    """Return whether a line is a label or an instruction, except memory accesses, phi, and calls of functions.

    Calls of LLVM's intrinsics count as instructions.
    """
    return not access_line.match(line) and (" call " not in line or "@llvm." in line) and " phi " not in line


def is_return(body: list[str], label: str) -> bool:
    """Return whether the basic block ``label`` only returns."""
    for index, line in enumerate(body):
        if line.startswith(f"{label}:"):
            return body[index + 1].strip() == "ret void"
    return False


def entry_point(name: str, parameters: list[str], fibers: bool, guarded: bool) -> str:
    """Return the function that the emulator calls for a block: it loads parameters and special registers, and runs the
    threads.
    """
    types = [parameter.split()[0] for parameter in parameters]
    values = [f"{ty} %a{index}" for index, ty in enumerate(types)]
    body = f"void {call_of_thread('ocp.body', values)}"
    if fibers:
        threads = [f"  call {body}", "  ret void"]
    elif guarded:
        threads = block_loops(guarded_row(values, body))
    else:
        threads = block_loops(["  br label %loop", *x_loop("", "loop.y", parallel_loop, "end.x", body)])
    define = f"define void @{name}(ptr %params, ptr %ocp.thread) nounwind {{"
    return "\n".join([define, "entry:", *parameter_loads(types), *block_loads(fibers), *threads, "}"])


def parameter_loads(types: list[str]) -> list[str]:
    """Return lines that load the kernel's parameters into ``%a0``, ``%a1``, ..."""
    lines = []
    for index, ty in enumerate(types):
        lines += [
            f"  %a{index}.slot = getelementptr ptr, ptr %params, i64 {index}",
            f"  %a{index}.address = load ptr, ptr %a{index}.slot",
            f"  %a{index} = load {ty}, ptr %a{index}.address",
        ]
    return lines


def block_loads(fibers: bool) -> list[str]:
    """Return lines that load special registers from the ``ocp_emu_thread`` record: the block's, with ``fibers`` also
    the thread's.
    """
    lines = []

    def load(value: str, ty: str, offset: int, limits: str = "") -> None:
        lines.append(f"  %{value}.slot = getelementptr i8, ptr %ocp.thread, i64 {offset}")
        lines.append(f"  %{value} = load {ty}, ptr %{value}.slot" + (f", !range {limits}" if limits else ""))

    for index, axis in enumerate(axes):
        if fibers:
            load(f"tid.{axis}", "i32", 4 * index)
        load(f"ntid.{axis}", "i32", 12 + 4 * index, block_range)
        load(f"ctaid.{axis}", "i32", 24 + 4 * index)
        load(f"nctaid.{axis}", "i32", 36 + 4 * index, grid_range)
    if fibers:
        load("laneid", "i32", 48)
    load("dynamic_shared", "i32", 52)
    load("shared", "ptr", 56)
    return lines


def call_of_thread(callee: str, values: list[str], prefix: str = "") -> str:
    """Return a call of ``callee`` for one thread.

    ``values`` are the kernel's parameters; the names of the thread's tid.x and lane begin with ``prefix``.
    """
    thread = [f"i32 %{prefix}tid.x", "i32 %tid.y", "i32 %tid.z"]
    thread += [f"i32 %{kind}.{axis}" for kind in ("ntid", "ctaid", "nctaid") for axis in axes]
    thread += [f"i32 %{prefix}laneid", "i32 %dynamic_shared", "ptr %shared", "ptr %ocp.thread"]
    return f"@{callee}({', '.join(values + thread)})"


def block_loops(row: list[str]) -> list[str]:
    """Return loops over tid.z and tid.y around ``row``, lines that run the threads along x and branch to ``end.x``."""
    return [
        "  br label %loop.z",
        "loop.z:",
        "  %tid.z = phi i32 [ 0, %entry ], [ %next.z, %end.y ]",
        "  br label %loop.y",
        "loop.y:",
        "  %tid.y = phi i32 [ 0, %loop.z ], [ %next.y, %end.x ]",
        "  %row.z = mul nuw nsw i32 %tid.z, %ntid.y",
        "  %row.y = add nuw nsw i32 %row.z, %tid.y",
        "  %row = mul nuw nsw i32 %row.y, %ntid.x",
        *row,
        "end.x:",
        "  %next.y = add nuw nsw i32 %tid.y, 1",
        "  %more.y = icmp ult i32 %next.y, %ntid.y",
        "  br i1 %more.y, label %loop.y, label %end.y",
        "end.y:",
        "  %next.z = add nuw nsw i32 %tid.z, 1",
        "  %more.z = icmp ult i32 %next.z, %ntid.z",
        "  br i1 %more.z, label %loop.z, label %done",
        "done:",
        "  ret void",
    ]


def guarded_row(values: list[str], body: str) -> list[str]:
    """Return the lines that run the threads along x, for a kernel with a `Guard`.

    If the threads that pass the checks are the first of the row, as at the end of an array, a loop without checks runs
    only these threads.
    """
    guard = f"i1 {call_of_thread('ocp.guard', values, 'all.')}"
    first = f"i1 {call_of_thread('ocp.guard', values, 'first.')}"
    inside = f"void {call_of_thread('ocp.inside', values, 'in.')}"
    return [
        "  br label %all.loop",
        *x_loop("all.", "loop.y", parallel_loop, "choose", condition=guard),
        "choose:",
        "  %every = icmp eq i32 %all.count, %ntid.x",
        "  br i1 %every, label %in, label %some",
        "some:",
        "  %none = icmp eq i32 %all.count, 0",
        "  br i1 %none, label %end.x, label %first.loop",
        *x_loop("first.", "some", parallel_loop, "compare", condition=first, limit="%all.count"),
        "compare:",
        "  %ordered = icmp eq i32 %first.count, %all.count",
        "  br i1 %ordered, label %in, label %loop",
        "in:",
        "  %limit = phi i32 [ %ntid.x, %choose ], [ %all.count, %compare ]",
        "  br label %in.loop",
        *x_loop("in.", "in", parallel_loop, "end.x", inside, limit="%limit"),
        *x_loop("", "compare", scalar_loop, "end.x", body),
    ]


def x_loop(
    prefix: str, before: str, loop: str, after: str, call: str = "", condition: str = "", limit: str = "%ntid.x"
) -> list[str]:
    """Return a loop over tid.x below ``limit``, whose labels and values begin with ``prefix``.

    Each iteration executes ``call``. With ``condition``, a call that returns i1, the loop instead counts the threads
    for which it returns true. ``before`` and ``after`` are the labels around the loop, ``loop`` is its metadata.
    """
    lines = [f"{prefix}loop:", f"  %{prefix}tid.x = phi i32 [ 0, %{before} ], [ %{prefix}next.x, %{prefix}loop ]"]
    if condition:
        lines.append(f"  %{prefix}so.far = phi i32 [ 0, %{before} ], [ %{prefix}count, %{prefix}loop ]")
    lines += [
        f"  %{prefix}linear = add nuw nsw i32 %row, %{prefix}tid.x",
        f"  %{prefix}laneid = and i32 %{prefix}linear, 31",
    ]
    if condition:
        lines.append(f"  %{prefix}result = call {condition}")
        lines.append(f"  %{prefix}one = zext i1 %{prefix}result to i32")
        lines.append(f"  %{prefix}count = add nuw nsw i32 %{prefix}so.far, %{prefix}one")
    else:
        lines.append(f"  call {call}")
    return [
        *lines,
        f"  %{prefix}next.x = add nuw nsw i32 %{prefix}tid.x, 1",
        f"  %{prefix}more.x = icmp ult i32 %{prefix}next.x, {limit}",
        f"  br i1 %{prefix}more.x, label %{prefix}loop, label %{after}, !llvm.loop {loop}",
    ]


meta_version, max_parameters, pointer_kind = 1, 64, 0x80


def meta_data(name: str, fibers: bool, static_shared: int, check: bool, parameter_bytes: list[int]) -> str:
    """Return the constant NAME.meta, an ``ocp_emu_kernel_meta``; `emulated_object` sets its stack_bytes later.

    Raises UnsupportedIR for more than `max_parameters` parameters.
    """
    if len(parameter_bytes) > max_parameters:
        raise UnsupportedIR(f"a kernel of {len(parameter_bytes)} parameters, expected at most {max_parameters}")
    kinds = [size or pointer_kind for size in parameter_bytes]
    kinds += [0] * (max_parameters - len(kinds))
    words = [meta_version, int(fibers), static_shared, 0, int(check), len(parameter_bytes)]
    ty = "{ " + ", ".join(["i32"] * len(words)) + f", [{max_parameters} x i8] }}"
    value = ", ".join(f"i32 {word}" for word in words)
    elements = ", ".join(f"i8 {kind}" for kind in kinds)
    return f'@"{name}.meta" = constant {ty} {{ {value}, [{max_parameters} x i8] [{elements}] }}, align 8'
