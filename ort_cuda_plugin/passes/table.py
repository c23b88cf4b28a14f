"""The passes between lowering and the making of kernels, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..program.trace import Step
from .attention_fusion import fuse_attention
from .common_subexpressions import eliminate_common_subexpressions
from .concat_elimination import eliminate_concats
from .dead_code_elimination import eliminate_dead_code
from .gqa_broadcast_elimination import eliminate_gqa_broadcasts
from .horizontal_fusion import fuse_horizontally
from .horizontal_gemm import merge_gemms
from .rematerialization import rematerialize
from .sink_through_concat import sink_through_concat
from .vertical_fusion import fuse_vertically

Watch: TypeAlias = Callable[[str, Sequence[Step]], None]
"""Is told the name of a pass, and the steps after it."""


def run_passes(
    recorded: Sequence[Step], fusion: bool, watch: Watch | None = None, *, attention: bool = True
) -> list[Step]:
    """The steps that are to be launched for those that operators recorded. Without ``fusion`` each stays its own.

    Without ``attention`` its products and softmax stay apart.
    """
    steps = list(recorded)
    if watch:
        watch("lowered", steps)
    for name, run in PASSES:
        if name == "live" or (fusion and (attention or name != "attend")):
            steps = run(steps)
            if watch:
                watch(name, steps)
    return steps


PASSES: tuple[tuple[str, Callable[[Sequence[Step]], list[Step]]], ...] = (
    ("live", eliminate_dead_code),
    ("spread", sink_through_concat),
    ("fuse", fuse_vertically),
    ("recompute", lambda steps: eliminate_dead_code(rematerialize(steps))),
    ("twins", eliminate_common_subexpressions),
    ("merge", merge_gemms),
    ("place", eliminate_concats),
    ("attend", fuse_attention),
    ("heads", eliminate_gqa_broadcasts),
    ("bundle", fuse_horizontally),
)
