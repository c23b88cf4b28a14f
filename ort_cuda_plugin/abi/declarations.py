"""C declarations of the parts of ONNX Runtime's ABI that the plugin uses, from ``abi.tables`` and ``abi.structs``.

The text is the C library's header ``csrc_shim/base/ort_abi.h``. Without preprocessor lines it is also the cffi cdef of
Python's bridge, so that C and Python have the same declarations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from .structs import CALLBACK_STRUCTS, ENUMS
from .tables import FUNCTION_TABLES, NEWEST_API, OLDEST_API


@dataclass(frozen=True)
class Slot:
    """One member of a function table or callback struct; ``since`` is the API version that added it."""

    index: int
    since: int
    declaration: str  # a C prototype, or a plain field

    @property
    def name(self) -> str:
        head = self.declaration.partition("(")[0]
        return head.split("}")[-1].split()[-1].lstrip("*") if head else self.declaration.split()[-1]

    @property
    def member(self) -> str:
        """Return the C member: a function pointer for a prototype, the field itself otherwise."""
        match = re.fullmatch(r"(.*?)(\w+)\((.*)\)", self.declaration)
        if match is None or "{" in self.declaration:
            return f"{self.declaration};"
        result, name, parameters = match.groups()
        return f"{result}(*{name})({parameters});"


def _entries(text: str) -> list[str]:
    joined: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line[0].isdigit():
            joined.append(line)
        else:
            joined[-1] += " " + line
    return joined


@cache
def slots(struct: str) -> tuple[Slot, ...]:
    """Return the declared slots of a function table or callback struct, in order.

    Raises:
        KeyError: no such struct is declared.
    """
    if struct in FUNCTION_TABLES:
        return tuple(
            Slot(int(index), int(since), declaration)
            for index, since, declaration in (entry.split(None, 2) for entry in _entries(FUNCTION_TABLES[struct]))
        )
    return tuple(
        Slot(index, int(since), declaration)
        for index, (since, declaration) in enumerate(
            entry.split(None, 1) for entry in _entries(CALLBACK_STRUCTS[struct])
        )
    )


def since(struct: str, name: str) -> int:
    """Return the API version that added slot ``name`` of ``struct``.

    Raises:
        KeyError: no such slot is declared.
    """
    for slot in slots(struct):
        if slot.name == name:
            return slot.since
    raise KeyError(f"ort_cuda_plugin/abi declares no member {name} of {struct}")


def _struct(name: str) -> str:
    lines = [f"struct {name} {{"]
    next_index = 0
    for slot in slots(name):
        if slot.index > next_index:
            lines.append(f"  void *reserved_{next_index}[{slot.index - next_index}];")
        comment = f" /* since {slot.since} */" if slot.since > OLDEST_API else ""
        lines.append(f"  {slot.member}{comment}")
        next_index = slot.index + 1
    lines.append("};")
    return "\n".join(lines)


def _enum(name: str) -> str:
    members = [member.strip() for member in " ".join(ENUMS[name].split()).split(",")]
    body = "\n".join(f"  {member.replace('=', ' = ')}," for member in members)
    return f"typedef enum {name} {{\n{body}\n}} {name};"


def declarations() -> str:
    """Return C text that declares every type of the tables. The text needs ``bool`` and the fixed-width integers."""
    structs = [*FUNCTION_TABLES, *CALLBACK_STRUCTS]
    text = " ".join([*FUNCTION_TABLES.values(), *CALLBACK_STRUCTS.values()])
    opaque = sorted(set(re.findall(r"\bOrt\w+\b", text)) - set(ENUMS) - set(structs) - {"OrtKernelCreateFunc"})
    opaque = [name for name in opaque if not re.search(rf"\b{name}\(", text)]
    functions = [
        "typedef OrtStatus *(*OrtKernelCreateFunc)(void *kernel_create_func_state, const OrtKernelInfo *info,\n"
        "                                          OrtKernelImpl **kernel_out);"
    ]
    newer = [
        f"  {struct}_{slot.name}_SINCE = {slot.since},"
        for struct in structs
        for slot in slots(struct)
        if slot.since > OLDEST_API
    ]
    versions = "\n".join(
        ["enum {", f"  OCP_OLDEST_API = {OLDEST_API},", f"  OCP_NEWEST_API = {NEWEST_API},", *newer, "};"]
    )
    forward = [f"typedef struct {name} {name};" for name in [*opaque, *structs]]
    return "\n".join([versions, *map(_enum, ENUMS), *forward, *functions, *map(_struct, structs)]) + "\n"


def header() -> str:
    """Return the text of ``csrc_shim/base/ort_abi.h``."""
    return (
        "/* Generated from ort_cuda_plugin/abi by build_plugin.py. */\n"
        "#ifndef OCP_ORT_ABI_H\n#define OCP_ORT_ABI_H\n\n"
        "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n\n"
        f"{declarations()}\n#endif\n"
    )
