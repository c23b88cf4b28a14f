"""Numba's lowering of typed kernels to LLVM IR, without what only reference counts and debuggers need.

Numba ends the life of each variable by a statement of its own, clears the variable there, and loads a variable before
each store to it, so that objects are released. The numbers and pointers of kernels have nothing to release. These
stores and loads are an eighth of the instructions; LLVM removes them first.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from numba.cuda import lowering
from numba.cuda.core import analysis, ir

lower_any_statement = lowering.Lower.lower_inst
store_variable = lowering.Lower.storevar


def find_singly_assigned(lower: Any) -> None:
    """Replace `Lower._find_singly_assigned_variable`, whose time grows with the square of a block's length."""
    blocks = lower.func_ir.blocks
    uses = analysis.compute_use_defs(blocks)
    used_elsewhere = set().union(*uses.usemap.values())
    assignments = Counter(each.target.name for block in blocks.values() for each in block.find_insts(ir.assign_types))
    excluded = used_elsewhere | analysis.must_use_alloca(blocks)
    lower._singly_assigned_vars = {name for name, count in assignments.items() if count == 1 and name not in excluded}
    lower._blk_local_varmap = {}


def lower_block(lower: Any, block: Any) -> None:
    """Replace `Lower.lower_block`: skip the context manager of each statement, which only adds a line to errors."""
    lower.pre_block(block)
    for statement in block.body:
        lower.loc = statement.loc
        lower.lower_inst(statement)
    lower.post_block(block)


def lower_statement(lower: Any, statement: Any) -> None:
    """Replace `Lower.lower_inst`: skip the text that Numba formats of each statement for debuggers."""
    if isinstance(statement, ir.Assign) and not isinstance(statement.value, ir.Arg):
        lower.notify_loc(lower.loc)
        name = statement.target.name
        lower.storevar(lower.lower_assign(lower.typeof(name), statement), name)
    else:
        lower_any_statement(lower, statement)


def store(lower: Any, value: Any, name: str, argidx: int | None = None) -> None:
    """Replace `Lower.storevar`: skip the load of the old value, which Numba releases."""
    if argidx is not None or name in lower._singly_assigned_vars:
        store_variable(lower, value, name, argidx)
    else:
        lower._alloca_var(name, lower.typeof(name))
        lower.builder.store(value, lower.getvar(name))
