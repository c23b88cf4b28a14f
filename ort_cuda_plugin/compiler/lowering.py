"""Numba's lowering of typed kernels to LLVM IR, without the work that only reference counting and debuggers need.

Numba emits a statement at the end of each variable's life that clears the variable, and loads a variable before each
store to it, so that objects are released. The numbers and pointers in kernels need no release. These loads and stores
would be an eighth of the instructions, which LLVM would have to remove.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from numba.cuda import lowering
from numba.cuda.core import analysis, ir

lower_any_statement = lowering.Lower.lower_inst
store_variable = lowering.Lower.storevar


def find_singly_assigned(lower: Any) -> None:
    """Replace `Lower._find_singly_assigned_variable`, whose time is quadratic in the length of a block."""
    blocks = lower.func_ir.blocks
    uses = analysis.compute_use_defs(blocks)
    used_elsewhere = set().union(*uses.usemap.values())
    assignments = Counter(each.target.name for block in blocks.values() for each in block.find_insts(ir.assign_types))
    excluded = used_elsewhere | analysis.must_use_alloca(blocks)
    lower._singly_assigned_vars = {name for name, count in assignments.items() if count == 1 and name not in excluded}
    lower._blk_local_varmap = {}


def lower_block(lower: Any, block: Any) -> None:
    """Replace `Lower.lower_block`: without a context manager per statement, which would only add a line to error
    messages.
    """
    lower.pre_block(block)
    for statement in block.body:
        lower.loc = statement.loc
        lower.lower_inst(statement)
    lower.post_block(block)


def lower_statement(lower: Any, statement: Any) -> None:
    """Replace `Lower.lower_inst`: without formatting each statement as text for debuggers."""
    if isinstance(statement, ir.Assign) and not isinstance(statement.value, ir.Arg):
        lower.notify_loc(lower.loc)
        name = statement.target.name
        lower.storevar(lower.lower_assign(lower.typeof(name), statement), name)
    else:
        lower_any_statement(lower, statement)


def store(lower: Any, value: Any, name: str, argidx: int | None = None) -> None:
    """Replace `Lower.storevar`: without loading the old value, which Numba would release."""
    if argidx is not None or name in lower._singly_assigned_vars:
        store_variable(lower, value, name, argidx)
    else:
        lower._alloca_var(name, lower.typeof(name))
        lower.builder.store(value, lower.getvar(name))
