"""Rewrites the LLVM IR of a CUDA kernel, as text, into IR for the emulated device.

Special registers and shared memory become arguments of the kernel, but the device functions that a kernel calls have no
such arguments. So there are two steps. `prepare_module` returns a module that LLVM can parse for the host, in which
operations that need these arguments are calls of functions ``nvvm.*`` or ``ptx.*``. The caller then inlines every
function into the kernel. `kernel_module` rewrites these calls, and adds the entry point that
``csrc_shim/emulator/kernel.h`` describes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ort_cuda_plugin.compiler.host import entry as host_entry
from ort_cuda_plugin.compiler.host import intrinsics as intrinsics
from ort_cuda_plugin.compiler.host import math as host_math
from ort_cuda_plugin.compiler.host import matrices
from ort_cuda_plugin.compiler.host.counts import add_counts
from ort_cuda_plugin.compiler.host.entry import UnsupportedIR, access_line, value_name

# ---- step 1: text that LLVM can parse for the host ----

scalar_types = ("i1", "i8", "i16", "i32", "i64", "i128", "float", "double", "half", "ptr")
address_space = re.compile(r" addrspace\(\d+\)")
named_pointer = re.compile(r'%"[^"\n]*"\*+')
end_of_pointed = re.compile(r"[}\]>](?=\*)")


def opaque_pointers(text: str) -> str:
    """Return the IR with all typed pointers replaced by ``ptr`` in the default address space.

    A text has many pointers, but few pointer types, so each type is replaced in the whole text at once.
    """
    text = address_space.sub("", text)
    for scalar in scalar_types:
        text = text.replace(f"{scalar}*", "ptr")
    if '"*' in text:
        text = named_pointer.sub("ptr", text)
    while True:
        while "ptr*" in text:
            text = text.replace("ptr*", "ptr")
        end = end_of_pointed.search(text)
        if end is None:
            return text
        text = text.replace(f"{aggregate_that_ends(text, end.end())}*", "ptr")


def aggregate_that_ends(text: str, end: int) -> str:
    """Return the struct, array or vector type that ends at position ``end`` of the text. Raises UnsupportedIR."""
    depth = 0
    for position in range(end - 1, -1, -1):
        depth += (text[position] in ")]}>") - (text[position] in "([{<")
        if depth == 0:
            return text[position:end]
    raise UnsupportedIR(f"type {text[:end].splitlines()[-1]!r}")


asm_functions = {
    "mov.u32 $0, %dynamic_smem_size;": "ptx.dynamic_smem_size",
    "mov.u32 $0, %lanemask_lt;": "ptx.lanemask_lt",
    "cvt.f32.f16 $0, $1;": "ptx.cvt.f32.f16",
    "cvt.rn.f16.f32 $0, $1;": "ptx.cvt.rn.f16.f32",
    "cvt.rn.bf16.f32 $0, $1;": "ptx.cvt.rn.bf16.f32",
    "tanh.approx.f32 $0, $1;": "ptx.tanh.approx.f32",
    "{ .reg .f32 t; mul.ftz.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }": "ptx.half_exp",
    "ex2.approx.ftz.f32 $0, $1;": "ptx.half_exp2",
    "rcp.approx.ftz.f32 $0, $1;": "ptx.half_reciprocal",
    "nanosleep.u32 $0;": "ptx.nanosleep",
    "ld.acquire.gpu.u32 $0, [$1];": "ptx.load_acquire",
    "mov.b32 $0, $1;": "ptx.opaque.i32",
    "mov.b64 $0, $1;": "ptx.opaque.i64",
    intrinsics.QUOTIENT: "ptx.quotient",
    **matrices.ASSEMBLY,
}
inline_asm = re.compile(r'call ([^\n]*?) asm\s+(?:sideeffect\s+)?"([^"]*)", "[^"]*"\s*\(([^\n]*)\)')
shared_global = re.compile(
    r'^@"?([\w.$]+)"? = (?:\w+ )*addrspace\(3\) (?:\w+ )*?(\[\d+ x [^\n]*?\])'
    r"(?: undef| zeroinitializer)?(?:, align (\d+))?$",
    re.MULTILINE,
)
dropped_lines = re.compile(
    r'^(?:target |; ModuleID|source_filename|@"?llvm\.used|!nvvm|@"?_ZN08NumbaEnv)[^\n]*\n', re.MULTILINE
)
type_bytes = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8, "i128": 16}


def size_of(ty: str) -> int:
    """Return the bytes of a value of LLVM type ``ty`` in memory; structs count as packed. Raises UnsupportedIR."""
    ty = ty.strip()
    if ty in type_bytes:
        return type_bytes[ty]
    if match := re.fullmatch(r"[\[<](\d+) x (.*)[\]>]", ty):
        return int(match[1]) * size_of(match[2])
    if match := re.fullmatch(r"\{(.*)\}", ty):
        return sum(size_of(member) for member in split_arguments(match[1]))
    raise UnsupportedIR(f"type {ty!r} in memory")


@dataclass
class SharedMemory:
    """Layout of a kernel's shared arrays. ``offsets`` has each array's byte offset in the block's shared memory.

    ``static_bytes`` is the total size of the arrays with a declared size. ``dynamic`` names the arrays whose size the
    launch sets; they begin after the others.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    static_bytes: int = 0
    dynamic: list[str] = field(default_factory=list)

    def add(self, name: str, ty: str, alignment: int) -> None:
        size = size_of(opaque_pointers(ty))
        if size == 0:
            self.dynamic.append(name)
            return
        alignment = max(alignment, 16)
        self.static_bytes = -(-self.static_bytes // alignment) * alignment
        self.offsets[name] = self.static_bytes
        self.static_bytes += size

    def finish(self) -> None:
        self.static_bytes = -(-self.static_bytes // 16) * 16
        for name in self.dynamic:
            self.offsets[name] = self.static_bytes


def prepare_module(text: str, shared: SharedMemory, check: bool = False) -> str:
    """Return one module after step 1, and add its shared arrays to ``shared``.

    With ``check``, a thread's arrays are not cleared, but filled with the byte that marks unwritten memory. Raises
    UnsupportedIR for inline PTX that `asm_functions` lacks.
    """
    text = dropped_lines.sub("", text)
    for name, ty, alignment in shared_global.findall(text):
        shared.add(name, ty, int(alignment or 1))
    text = shared_global.sub("", text)
    text = opaque_pointers(text)
    if check:
        text = with_unwritten_arrays(text)
    text = re.sub(r'addrspacecast ptr @"?(_cudapy_smem[\w.$]*)"? to ptr', r"call ptr @ptx.shared.\1()", text)
    text = text.replace("addrspacecast ptr", "bitcast ptr")
    text = re.sub(r'@"llvm\.nvvm\.', '@"nvvm.', text)
    text = re.sub(r"@llvm\.nvvm\.", "@nvvm.", text)
    text = re.sub(r"^(define [^\n]*?) noinline", r"\1", text, flags=re.MULTILINE)
    declarations = {f"declare ptr @ptx.shared.{name}()" for name in re.findall(r"@ptx\.shared\.([\w.$]+)\(", text)}

    def replace_asm(match: re.Match[str]) -> str:
        result, code, arguments = match.groups()
        function = asm_functions.get(code)
        if function is None:
            raise UnsupportedIR(f"inline assembly {code!r}")
        types = ", ".join(argument.rsplit(" ", 1)[0] for argument in split_arguments(arguments))
        declarations.add(f"declare {result} @{function}({types})")
        return f"call {result} @{function}({arguments})"

    text = inline_asm.sub(replace_asm, text)
    return text + "\n" + "\n".join(sorted(declarations)) + "\n"


cleared_array = re.compile(
    rf"^(?P<alloca>\s*(?P<name>{value_name}) = alloca (?P<type>\[[^\n]*?\]))(?P<end>(?:, align \d+)?\n)"
    r"\s*store (?P=type) zeroinitializer, ptr (?P=name)(?:, align \d+)?$",
    re.MULTILINE,
)


def with_unwritten_arrays(text: str) -> str:
    """Return the module with a thread's arrays filled with the byte `EMU_UNWRITTEN` of ``emulator/shadow.h``.

    Numba clears each array at the start of the function, which would hide reads of elements that the kernel has not
    written.
    """
    fill = "call void @llvm.memset.p0.i64(ptr {name}, i8 -1, i64 {size}, i1 false)"
    text, count = cleared_array.subn(
        lambda match: (
            f"{match['alloca']}{match['end']}  {fill.format(name=match['name'], size=size_of(match['type']))}"
        ),
        text,
    )
    declaration = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"
    return text + declaration if count and declaration.split("(")[0] not in text else text


def split_arguments(text: str) -> list[str]:
    """Split a list of arguments at the commas that are not in brackets."""
    out, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        elif character == "," and depth == 0:
            out.append(text[start:position].strip())
            start = position + 1
    if text[start:].strip():
        out.append(text[start:].strip())
    return out


# ---- step 2: rewrite calls that need the kernel's arguments ----

call_line = re.compile(
    rf"^(?P<head>\s*(?:{value_name} = )?)(?:tail |notail )?call (?P<type>[^@]*?) ?@(?P<name>[\w.$]+)\((?P<args>.*?)\)"
    r"(?: #\d+)?(?P<tail>(?:, !.*)?)$"
)
stack_line = re.compile(
    rf"^\s*({value_name}) = (?:alloca |getelementptr [^@%]*?ptr ({value_name})|bitcast ptr ({value_name}))"
)
function_pattern = re.compile(
    r"^define [^\n]*?void @([\w.$]+)\(([^\n]*)\)[^\n]*\{\n(.*?)^\}\n", re.MULTILINE | re.DOTALL
)
contracted = re.compile(r" = (fadd|fsub|fmul|fneg) (?=float|double|<)")


def kernel_module(
    text: str,
    mangled_name: str,
    name: str,
    parameter_bytes: list[int],
    shared: SharedMemory,
    check: bool,
    contract: bool = True,
    count: bool = False,
) -> str:
    """Return the complete module after step 2, for a module whose functions are all inlined into the kernel
    ``mangled_name``.

    The kernel gets the name ``name``. ``parameter_bytes`` has the size of each scalar parameter, and 0 for each
    pointer. ``check`` and ``count`` add the calls of the checking and counting modes; with ``contract``, operations may
    fuse to FMAs. Raises UnsupportedIR.
    """
    match = next((m for m in function_pattern.finditer(text) if m[1] == mangled_name), None)
    if match is None:
        raise UnsupportedIR(f"a module without the kernel function {mangled_name}")
    parameters = split_arguments(match[2])
    calls: set[str] = set()
    lines = contracted.sub(r" = \1 contract ", match[3]) if contract else match[3]
    body = [rewrite_line(line, shared, calls) for line in matrices.with_accesses(lines).splitlines()]
    fibers = bool(calls & intrinsics.switching_calls.keys())
    if check:
        body = add_checks(body)
    counted: list[str] = []
    if count:
        *body, comment = add_counts(body, size_of, stored_type)
        counted = [comment]
    if (check or count) and not fibers:
        body = add_thread_index(body)
    kept = [
        line
        for line in (text[: match.start()] + text[match.end() :]).splitlines()
        if not line.startswith(("declare ", "target ", "source_filename", ";"))
    ]
    functions = host_entry.kernel_functions(name, parameters, body, fibers)
    meta = host_entry.meta_data(name, fibers, shared.static_bytes, check, parameter_bytes)
    joined = "\n".join([functions, meta, *counted, *kept]) + "\n"
    return joined + support(joined)


def rewrite_line(line: str, shared: SharedMemory, calls: set[str]) -> str:
    """Return one line of the kernel's body after step 2. Add the name of a called function to ``calls``.

    Raises UnsupportedIR for a call that `call_line` does not match.
    """
    if " call " not in line:
        return line
    match = call_line.match(line)
    if match is None:
        raise UnsupportedIR(f"call {line.strip()!r}")
    head, name, arguments = match["head"], match["name"], match["args"]
    calls.add(name)
    if name in intrinsics.register_values:
        return f"{head}add i32 {intrinsics.register_values[name]}, 0"
    if name.startswith("ptx.shared."):
        return f"{head}getelementptr i8, ptr %ocp.shared, i64 {shared.offsets[name.removeprefix('ptx.shared.')]}"
    if name in intrinsics.switching_calls:
        return head + intrinsics.switching_calls[name].format(arguments)
    if name in intrinsics.fences:
        return f"{head}fence seq_cst"
    if name == "ptx.lanemask_lt":
        return f"{head}call i32 @ptx.lanemask_lt(i32 %ocp.laneid)"
    if name in intrinsics.atomics:
        operation, size = intrinsics.atomics[name]
        return f"{head}atomicrmw {operation} {arguments} monotonic, align {size}"
    return line


def add_checks(body: list[str]) -> list[str]:
    """Return the body with a call of the checking mode before each memory access, except to the thread's own arrays."""
    on_stack = {"@ocp_emu_alias"}  # a global variable of the emulator, which needs no check
    out = []
    for line in body:
        if match := stack_line.match(line):
            base = match[2] or match[3]
            if base is None or base in on_stack:
                on_stack.add(match[1])
        if match := access_line.match(line):
            kind, ty, pointer = "atomic", match["rmw"] or match["cas"], match["rmw_ptr"] or match["cas_ptr"]
            if match["load"]:
                kind, ty, pointer = "load", match["load"], match["load_ptr"]
            elif match["store"]:
                kind, ty, pointer = "store", stored_type(match["store"]), match["store_ptr"]
            if pointer not in on_stack:
                out.append(f"  call void @ocp_emu_check_{kind}(ptr %ocp.thread, ptr {pointer}, i32 {size_of(ty)})")
        out.append(line)
    return out


def add_thread_index(body: list[str]) -> list[str]:
    """Return the body with stores of the thread's index at its start, for a kernel that runs in a loop over threads.

    Checks report this index with an error.
    """
    label = 1 if body and body[0].rstrip().endswith(":") else 0
    stores = []
    for index, axis in enumerate("xyz"):
        stores.append(f"  %ocp.noted.{axis} = getelementptr i8, ptr %ocp.thread, i64 {4 * index}")
        stores.append(f"  store i32 %ocp.tid.{axis}, ptr %ocp.noted.{axis}")
    return [*body[:label], *stores, *body[label:]]


def stored_type(operand: str) -> str:
    """Return the type in ``<type> <value>``."""
    if operand[0] in "<[{":
        depth = 0
        for position, character in enumerate(operand):
            depth += (character in "<[{") - (character in ">]}")
            if depth == 0:
                return operand[: position + 1]
    return operand.split(" ", 1)[0]


def support(text: str) -> str:
    """Return definitions and declarations of all functions that ``text`` calls, directly or indirectly.

    Raises UnsupportedIR for an unknown function.
    """
    out: list[str] = []
    seen = set(re.findall(r"^define [^@]*@([\w.$]+)\(", text, re.MULTILINE))
    pending = [text]
    llvm_calls: list[str] = [text]
    while pending:
        for name in sorted(set(re.findall(r"call [^@\n]*@([\w.$]+)\(", pending.pop())) - seen):
            seen.add(name)
            if definition := intrinsics.definitions.get(name) or host_math.definitions.get(name):
                out.append(definition)
                pending.append(definition)
                llvm_calls.append(definition)
            elif declaration := intrinsics.declarations.get(name) or host_math.libm_declarations.get(name):
                out.append(declaration + "\n")
            elif not name.startswith("llvm."):
                raise UnsupportedIR(f"function {name!r}")
    return "".join(out) + "\n".join(llvm_declarations(llvm_calls)) + "\n"


def llvm_declarations(texts: list[str]) -> list[str]:
    """Return declarations of the LLVM intrinsics that the texts call."""
    found: dict[str, str] = {}
    for text in texts:
        for line in text.splitlines():
            if match := re.search(r"call (?:[a-z]+ )*?((?:\w+|[<{\[][^@]*)) @(llvm\.[\w.$]+)\((.*)\)", line):
                types = ", ".join(stored_type(argument) for argument in split_arguments(match[3]))
                found[match[2]] = f"declare {match[1]} @{match[2]}({types})"
    return [found[name] for name in sorted(found)]
