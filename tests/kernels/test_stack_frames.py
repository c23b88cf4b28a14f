"""Stack bytes that are read from the machine code of functions for x86-64 and aarch64."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from ort_cuda_plugin.compiler.elf import Elf
from ort_cuda_plugin.compiler.host.stack_frame import CALLEE_BYTES, frame_bytes

SOURCE = """
declare void @use(ptr)
define void @with_frame() {{
  %local = alloca [{size} x i8], align {align}
  call void @use(ptr %local)
  ret void
}}
define i32 @leaf(i32 %a) {{
  ret i32 %a
}}
"""


def stack_of(architecture: str, function: str, size: int, align: int) -> int:
    """Return the stack bytes of a function of SOURCE that LLVM compiled for the architecture."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = f"{architecture}-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, reloc="static", codemodel="large")
    module = llvm.parse_assembly(SOURCE.format(size=size, align=align))
    module.triple = triple
    data = machine.emit_object(module)
    elf = Elf(data)
    symbol = elf.symbol(function)
    start = elf.symbol_offset(symbol)
    return frame_bytes(data[start : start + symbol.size], elf.machine)


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("size", "align"), [(16, 1), (400, 8), (5000, 16), (70000, 8), (256, 64)])
def test_a_frame_holds_its_local_variables(architecture: str, size: int, align: int) -> None:
    frame = stack_of(architecture, "with_frame", size, align)
    assert CALLEE_BYTES + size <= frame <= CALLEE_BYTES + size + 4096 + 512, frame


def test_a_leaf_function_needs_no_frame() -> None:
    assert stack_of("aarch64", "leaf", 16, 1) == CALLEE_BYTES
    assert stack_of("x86_64", "leaf", 16, 1) == 0  # not understood: the emulated device takes its default


def test_code_for_another_cpu_is_not_understood() -> None:
    assert frame_bytes(b"\x00" * 16, machine=243) == 0
