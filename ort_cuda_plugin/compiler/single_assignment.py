"""Static single assignment (SSA) form of Numba's IR, in linear time.

For each variable with several definitions, Numba rewrites all statements of a kernel twice, which takes quadratic time.
This version visits only the blocks that use the variable. The result is the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from numba.cuda.core import ir, ssa
from numba.cuda.core.analysis import compute_cfg_from_blocks


def reconstruct_ssa(func_ir: Any) -> Any:
    """Replace Numba's ``reconstruct_ssa``."""
    blocks = dict(func_ir.blocks)
    cfg = compute_cfg_from_blocks(blocks)
    frontiers = ssa._iterated_domfronts(cfg)
    defining: dict[str, dict[int, None]] = defaultdict(dict)
    using: dict[str, dict[int, None]] = defaultdict(dict)
    definitions: dict[str, int] = defaultdict(int)
    variables = ssa._CacheListVars()
    for label, block in blocks.items():
        for statement in block.body:
            target = ""
            if isinstance(statement, ir.assign_types):
                target = statement.target.name
                definitions[target] += 1
                defining[target][label] = None
                used = values_of(statement.value, variables)
            else:
                used = variables.get(statement)
            for variable in used:
                using[variable.name][label] = None
    several = [name for name, count in definitions.items() if count > 1]
    dominators = cfg.dominators()
    undominated = [
        name
        for name, labels in using.items()
        if definitions.get(name, 0) < 2
        and any(defining.get(name, {}).keys().isdisjoint(dominators[label]) for label in labels)
    ]
    for name in (*several, *undominated):
        rename(blocks, name, defining[name], using[name], cfg, frontiers, variables)
    func_ir.blocks = blocks
    return func_ir


def values_of(value: Any, variables: Any) -> Any:
    """Return the variables that an assigned value refers to."""
    if isinstance(value, ir.inst_types):
        return variables.get(value)
    return [value] if isinstance(value, ir.var_types) else []


def rename(
    blocks: dict[int, Any],
    name: str,
    defining: dict[int, None],
    using: dict[int, None],
    cfg: Any,
    frontiers: dict[int, set[int]],
    variables: Any,
) -> None:
    """Give each definition of a variable its own name, and each use the name of the definition that reaches it."""
    scope = next(iter(blocks.values())).scope
    states: dict[str, Any] = {"scope": scope, "varname": name, "defmap": defaultdict(list)}
    blocks.update(ssa._run_block_rewrite(chosen(blocks, defining), states, ssa._FreshVarHandler()))
    states |= {"phimap": defaultdict(list), "cfg": cfg}
    states["phi_locations"] = ssa._compute_phi_locations(frontiers, states["defmap"])
    blocks.update(ssa._run_block_rewrite(chosen(blocks, using), states, ssa._FixSSAVars(variables)))
    for label, functions in states["phimap"].items():
        if functions:
            block = ir.Block(scope=blocks[label].scope, loc=blocks[label].loc)
            block.body = functions + blocks[label].body
            blocks[label] = block


def chosen(blocks: dict[int, Any], labels: dict[int, None]) -> dict[int, Any]:
    """Return the blocks with ``labels``, in the order of ``blocks``, which determines the new names."""
    return {label: block for label, block in blocks.items() if label in labels}
