"""Specification of a kernel: its Python source, and the types of its parameters.

Importing this module imports neither Numba nor NumPy: operators create specs even if all kernels are in the cache.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

type_pattern = re.compile(
    r"\*(f16|bf16|f8e4m3fn(uz)?|f8e5m2(fnuz)?|f8e8m0|f4e2m1|f32|f64|b1|[iu](2|4|8|16|32|64))|i32|i64|f32|f64"
)
"""Valid parameter types: pointers to elements of a storage type, and four types of scalars."""


def digest_of(*fields: object) -> str:
    return hashlib.sha256(repr(fields).encode()).hexdigest()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: everything that its machine code depends on, except the target.

    ``signature`` has one entry per parameter. ``"*f32"`` is a pointer to float32; the kernel sees ``*f16`` and
    ``*bf16`` as uint16, smaller floats and ``*b1`` as uint8, ``*i4`` as int8. ``"i32" "i64" "f32" "f64"`` are scalars.

    ``source`` is Python text that defines ``def kernel(...)``. It may use the names of
    `ort_cuda_plugin.compiler.intrinsics`, ``cuda``, ``libdevice``, ``math`` and the number types with sizes, such as
    ``int32``. ``launch_bounds`` is the number of threads of a block (0: unknown, and registers are not limited). The
    compiler limits registers so that ``resident`` such blocks fit on a multiprocessor (0: one block). ``owner`` is the
    custom operator whose author wrote the kernel, for error messages.

    Raises ValueError for a name that is not an identifier, and for an unknown parameter type.
    """

    name: str
    signature: tuple[str, ...]
    source: str
    launch_bounds: int = 0
    resident: int = 0
    owner: str = field(default="", kw_only=True, compare=False)
    tools: ClassVar[tuple[str, ...]] = ()
    """Python distributions that compile this type of kernel for GPUs, in addition to those that every kernel needs."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name):
            raise ValueError(f"kernel name {self.name!r}: expected an identifier")
        for entry in self.signature:
            if not type_pattern.fullmatch(entry):
                raise ValueError(
                    f"kernel {self.name!r}: {entry!r} in the signature is not a parameter type, expected one such as "
                    "i32, f32 or *f32"
                )

    @cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of every field except ``owner``."""
        return digest_of(self.name, *self.contents)

    @property
    def contents(self) -> tuple[object, ...]:
        """Return everything that the LLVM IR depends on: all fields except the name and ``owner``."""
        return self.signature, self.source, self.launch_bounds, self.resident

    @property
    def symbol(self) -> str:
        """Return the name of the compiled kernel: ``name`` and a part of the digest, so that two specs never share a
        symbol.
        """
        return f"{self.name}_{self.digest[:12]}"
