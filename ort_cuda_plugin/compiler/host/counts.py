"""Counting mode of the emulated device: inserts calls into a kernel that count memory accesses and basic blocks.

The instructions of a basic block are counted by kind at compile time, as a GPU would issue them for the LLVM IR.
Multiplied by the number of times that the block is executed, they are the kernel's instruction mix in a Run.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

from ort_cuda_plugin.compiler.host.entry import access_line, value_name
from ort_cuda_plugin.compiler.host.matrices import COPIED

MARK = "; ocp.counted "
STORE, ATOMIC, COPY = 1 << 16, 1 << 17, 1 << 20
"""Bits of the argument ``what`` of `ocp_emu_count_access`, above the access's size in bytes."""
DECLARATIONS = {
    "ocp_emu_count_access": "declare void @ocp_emu_count_access(ptr, ptr, i32, i32) nounwind",
    "ocp_emu_count_part": "declare void @ocp_emu_count_part(ptr, i32) nounwind",
}

_label = re.compile(r"^(?:[-\w.$]+|\"[^\"]*\"):")
_operation = re.compile(rf"^\s*(?:{value_name} = )?(?:tail |notail )?([a-z_]+)\b(.*)")
_vector = re.compile(r"<(\d+) x (float|double|half|i\d+|ptr)>")
_constant_offset = re.compile(r", ptr [^,]+(?:, i\d+ -?\d+)+$")
_called = re.compile(r"@([\w.$]+)\(")
_stack_line = re.compile(
    rf"^\s*({value_name}) = (?:alloca |getelementptr [^@%]*?ptr ({value_name})|bitcast ptr ({value_name}))"
)
_address = re.compile(rf"^\s*{value_name} = inttoptr i64 ({value_name}) to ptr")
_constant_sum = re.compile(rf"^\s*({value_name}) = (?:add|or disjoint)\b.* i64 {value_name}, -?\d+$")
_place_read = re.compile(rf"^\s*({value_name}) = add i32 %ocp\.[\w.]+, 0$")
_value = re.compile(value_name)
_cleared = re.compile(rf"@llvm\.memset[\w.]*\(ptr [^,]*?({value_name}),")
_free = {
    *("phi", "ret", "bitcast", "ptrtoint", "inttoptr", "freeze", "extractelement", "insertelement", "shufflevector"),
    *("extractvalue", "insertvalue", "unreachable", "alloca", "trunc", "zext", "sext", "addrspacecast"),
}
_wide = 2
"""Instructions that a GPU issues for an operation on 64-bit integers."""
_divisions = {"sdiv": 20, "udiv": 18, "srem": 22, "urem": 20}
_float_division = 9
_functions = {
    "exp": (6, 1),
    "exp2": (3, 1),
    "log": (14, 1),
    "log2": (6, 1),
    "pow": (60, 2),
    "tanh": (14, 2),
    "erf": (22, 1),
    "erfc": (30, 2),
    "sin": (30, 0),
    "cos": (30, 0),
    "tan": (40, 1),
    "sqrt": (6, 1),
    "rsqrt": (2, 1),
    "log1p": (22, 1),
    "expm1": (18, 1),
}
"""For each math function: (instructions, how many of them run on the special function unit). `_other_function` is for
functions that are not listed.
"""
_quotient = 4
"""Instructions of an integer division by a precomputed reciprocal, measured in the SASS of sm_90 kernels with different
numbers of divisions.
"""
_approximations = {"ptx.half_exp": (2, 1), "ptx.half_exp2": (1, 1), "ptx.half_reciprocal": (1, 1)}
"""For each approximation: (instructions, how many of them run on the special function unit)."""
_other_function = (20, 1)
_single = (
    *("llvm.fma", "llvm.fmuladd", "llvm.fabs", "llvm.min", "llvm.max", "llvm.s", "llvm.u", "llvm.ct", "llvm.abs"),
    *("fmaf", "fma", "fabsf", "fminf", "fmaxf", "llvm.copysign", "llvm.bitreverse", "llvm.bswap", "llvm.fsh"),
    *("__nv_fminf", "__nv_fmaxf"),
)
"""Prefixes of the names of functions that are a single instruction on a GPU."""

Counts = Counter[str]
"""Number of instructions by kind: "issued" (all), "float" (float units), "double", "special" (special function unit),
"matrix" (``mma`` of 16-bit operands), "matrix_tf32", "matrix_int8", "barriers", "shuffles", "waits0" (for all
asynchronous copies), "waits1" (for all but the last group).

"stack" are those of "issued" that a GPU issues only if a thread's arrays are in local memory instead of registers.
"""


def add_counts(body: list[str], size_of: Callable[[str], int], stored_type: Callable[[str], str]) -> list[str]:
    """Return the body with calls that count memory accesses and basic blocks.

    The last line is a comment with the number of instructions of each basic block, by kind.
    """
    on_stack: set[str] = set()
    addresses = {match[1] for line in body if (match := _address.match(line))}
    mentioned = Counter(name for line in body for name in _value.findall(line))
    accesses: list[int] = []  # for each access: the index of its basic block in `parts`
    parts: list[Counts] = []
    out: list[str] = []
    waiting = True  # until the first line of a basic block that is not a phi
    current: Counts = Counter()
    for line in body:
        if _label.match(line):
            waiting = True
            out.append(line)
            continue
        if waiting and line.strip() and " phi " not in line:
            waiting = False
            current = Counter()
            parts.append(current)
            out.append(f"  call void @ocp_emu_count_part(ptr %ocp.thread, i32 PLACE{len(parts) - 1})")
        if match := _stack_line.match(line):
            base = match[2] or match[3]
            if base is None or base in on_stack:
                on_stack.add(match[1])
                current["stack"] += instructions(line)["issued"]
        if match := access_line.match(line):
            bits, ty, pointer = ATOMIC, match["rmw"] or match["cas"], match["rmw_ptr"] or match["cas_ptr"]
            if match["load"]:
                bits, ty, pointer = COPY * (COPIED in line), match["load"], match["load_ptr"]
            elif match["store"]:
                bits, ty, pointer = STORE, stored_type(match["store"]), match["store_ptr"]
            # An asynchronous copy is one instruction, although the IR loads and stores: count only the store to shared
            # memory.
            current["issued"] += not bits & COPY
            if pointer in on_stack:
                current["stack"] += 1
            else:
                number = len(accesses)
                accesses.append(len(parts) - 1)
                what = bits | size_of(ty)
                out.append(
                    f"  call void @ocp_emu_count_access(ptr %ocp.thread, ptr {pointer}, i32 {what}, i32 {number})"
                )
        elif not (
            ((match := _cleared.search(line)) and match[1] in on_stack)
            # Numba reads thread and block indices of all dimensions; NVVM removes the reads that are not used.
            or ((match := _place_read.match(line)) and mentioned[match[1]] == 1)
            # Lines that select what an asynchronous copy loads: on a GPU, the condition is an operand of the copy.
            or line.lstrip().startswith(COPIED)
            # On a GPU, a constant that is added to an address is part of the memory instruction.
            or ((match := _constant_sum.match(line)) and match[1] in addresses)
        ):
            current.update(instructions(line))
        out.append(line)
    for part in parts:
        # On a GPU, a multiplication and an addition fuse to one FMA.
        joined = min(part.pop("products", 0), part.pop("sums", 0))
        part.subtract({"issued": joined, "float": joined})
    first = len(accesses)
    text = "\n".join(out)
    text = re.sub(r"i32 PLACE(\d+)\)", lambda found: f"i32 {first + int(found[1])})", text)
    return [*text.split("\n"), MARK + json.dumps({"accesses": accesses, "parts": [dict(part) for part in parts]})]


def metadata(text: str) -> dict[str, int]:
    """Return the counts in the comment of `add_counts`, as metadata of a `KernelImage`."""
    line = next(line for line in text.splitlines() if line.startswith(MARK))
    data = json.loads(line.removeprefix(MARK))
    found = {"accesses": len(data["accesses"]), "parts": len(data["parts"])}
    found.update((f"access{number}.part", part) for number, part in enumerate(data["accesses"]))
    for number, part in enumerate(data["parts"]):
        found.update((f"part{number}.{kind}", round(count)) for kind, count in part.items())
    return found


def instructions(line: str) -> Counts:
    """Return the number of instructions that a GPU issues for a line of IR that does not access memory, by kind."""
    match = _operation.match(line)
    if match is None:
        return Counter()
    name, rest = match[1], match[2]
    if name in _free:
        return Counter()
    vector = _vector.search(rest)
    lanes = int(vector[1]) if vector else 1
    if name == "call":
        return _call(rest, lanes)
    if name == "br":
        return Counter(issued=1 if " i1 " in line else 0)
    if name in ("fadd", "fsub", "fmul", "fcmp", "fneg"):
        if "double" in rest:
            return Counter(issued=lanes, double=lanes)
        kind = {"fmul": "products", "fadd": "sums", "fsub": "sums"}.get(name, "others")
        return Counter({"issued": lanes, "float": lanes, kind: lanes})
    if name == "getelementptr":  # a constant offset is part of the memory instruction
        return Counter(issued=0 if _constant_offset.search(rest) else 1)
    if name in ("and", "or", "xor") and re.match(r" (?:disjoint )?i1 ", rest):
        return Counter()  # logic on predicates is folded into other instructions
    if name == "select" and re.match(r" i1 [^,]+, i1 ", rest):
        return Counter()  # selections between predicates are folded into other instructions
    if name == "fdiv":
        return Counter(issued=_float_division * lanes, float=_float_division * lanes, special=lanes)
    if name in _divisions:
        return Counter(issued=_divisions[name] * lanes * (4 if "i64" in rest else 1))
    return Counter(issued=lanes * (_wide if "i64" in rest else 1))


def _call(rest: str, lanes: int) -> Counts:
    match = _called.search(rest)
    name = match[1] if match else ""
    if "load_matrices" in name:
        return Counter()  # `matrices.with_accesses` adds loads, which are counted instead
    if name == "ocp.matrix.tf32":
        return Counter(issued=1, matrix_tf32=1)
    if name in ("ocp.matrix.i8", "ocp.matrix.u8"):
        return Counter(issued=1, matrix_int8=1)
    if "matrix" in name:
        return Counter(issued=1, matrix=1)
    if name in ("ptx.shared_address", "ptx.copy_async_commit"):
        return Counter()  # part of a load or copy that is counted in another line
    if name.startswith("ptx.copy_async_wait_"):
        return Counter({"issued": 1, f"waits{name[-1]}": 1})
    if name == "ocp_emu_barrier":
        return Counter(issued=1, barriers=1)
    if "shfl" in name or "vote" in name or "warp_barrier" in name:
        return Counter(issued=1, shuffles=1)
    if name.startswith(("llvm.assume", "llvm.lifetime", "ocp_emu_count", "llvm.experimental")):
        return Counter()
    if name.startswith("llvm.memset"):  # Numba clears a thread's arrays; NVVM removes these dead stores
        return Counter()
    if name in _approximations:
        issued, special = _approximations[name]
        return Counter(issued=issued * lanes, float=issued * lanes, special=special * lanes)
    if name == "ptx.cvt.rna.tf32.f32":
        return Counter(issued=1)
    if name.startswith("ptx.opaque"):  # only hides a value from LLVM's optimizer
        return Counter()
    if name == "ptx.quotient":
        return Counter(issued=_quotient * lanes)
    if name.startswith(("ptx.", *_single)):
        is_float = "float" in rest or "f32" in name
        return Counter({"issued": lanes, **({"float": lanes} if is_float else {})})
    plain = name.removeprefix("llvm.").removeprefix("nvvm.").removeprefix("__nv_").split(".")[0].removesuffix("f")
    issued, special = _functions.get(plain, _other_function)
    return Counter(issued=issued * lanes, float=issued * lanes, special=special * lanes)
