"""Problem descriptions for a plan's cuBLASLt and cuDNN calls.

A step becomes a library call only if `DeviceProperties.libraries` contains the library, and otherwise a kernel of the
plugin. ``csrc_shim/vendor/spec.h`` defines the fields of a description.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..expressions.symbolic import Dim

WORKSPACE_BYTES = 32 * 1024 * 1024
"""Maximum workspace of a library call, bytes; NVIDIA's recommendation for cuBLASLt on recent GPUs."""

LARGE_WORKSPACE_BYTES = 8 * WORKSPACE_BYTES
"""Maximum workspace of a convolution if the option cudnn_conv_use_max_workspace is on, bytes."""

MATMUL, CONV, ATTENTION = 0, 1, 2
"""Values of ``ocp_problem_kind``: the kind of a problem."""


class ProblemFlags(enum.IntFlag):
    """Flags of ``ocp_problem_spec``."""

    TF32 = 1
    DETERMINISTIC = 2
    BIAS = 4
    A_TRANSPOSED = 8
    B_TRANSPOSED = 16
    RELU = 32
    GELU = 64
    RESIDUAL = 128
    BRIEF = 256
    MEASURED = 512
    CHANNELS_LAST = 1024
    SWISH = 2048
    RELU6 = 4096


@dataclass(frozen=True)
class LibraryProblem:
    """A problem for a vendor library, with the fields of ``ocp_problem_spec``.

    Sizes are arguments of the calls and not fields, so that calls of different sizes can share a problem.
    """

    kind: int
    dtype: int
    flags: ProblemFlags
    rank: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    measuring_ms: int = 0


_NOT_COMPUTED = ProblemFlags.BRIEF | ProblemFlags.MEASURED
"""Flags that decide how a library searches for an algorithm, not what it computes."""

Refusal = tuple[int, ...]
"""A call that a library refused: (kind, element type, flags, rank, *sizes of the call)."""


class Refusals:
    """The calls that the libraries of a device have refused, in this process or an earlier one. Not thread safe.

    ``latest`` describes the call that was refused last in this process, and the reason.
    """

    def __init__(self, known: Iterable[Refusal] = ()) -> None:
        self._known: dict[Refusal, set[Refusal]] = {}
        self.latest = ""
        for refusal in known:
            self._known.setdefault(refusal[:4], set()).add(refusal)

    @staticmethod
    def refusal(problem: LibraryProblem, sizes: Sequence[int]) -> Refusal:
        """Return the entry for a refused call; ``sizes`` are its integer arguments without the workspace size."""
        return (problem.kind, problem.dtype, int(problem.flags & ~_NOT_COMPUTED), problem.rank, *sizes)

    def add(self, refusal: Refusal) -> bool:
        """Add an entry; return whether it is the first one for its problem."""
        same = self._known.setdefault(refusal[:4], set())
        is_first = not same
        same.add(refusal)
        return is_first

    def matches(self, problem: LibraryProblem, sizes: Sequence[Dim]) -> bool:
        """Return whether a call of the problem with these sizes was refused; if a size is symbolic, with any sizes."""
        known = self._known.get(self.refusal(problem, ()), set())
        static = [size for size in sizes if isinstance(size, int)]
        return bool(known) and (len(static) < len(sizes) or self.refusal(problem, static) in known)
