"""Numba's type inference for a kernel, which skips statements whose types cannot have changed.

Numba repeats all statements until no variable's type changes, which takes at least two rounds. This version repeats a
statement only if a variable whose type it has looked up has since changed its type.
"""

from __future__ import annotations

from typing import Any

from numba.cuda.core import typeinfer
from numba.cuda.core.errors import ForceLiteralArg, TypingError
from numba.cuda.utils import chain_exception


class RecordedTypes(typeinfer.TypeVarMap):  # type: ignore[misc]
    """The types of a kernel's variables; records which variables are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up: list[Any] = []

    def __getitem__(self, name: str) -> Any:
        variable = self.get(name)
        if variable is None:
            self[name] = variable = typeinfer.TypeVar(self.context, name)
        self.looked_up.append(variable)
        return variable


def propagate(network: Any, inferer: Any) -> list[Exception]:
    """Replace `ConstraintNetwork.propagate`: run one round, and return the errors of the constraints that are not yet
    resolved.
    """
    errors: list[Exception] = []
    types = inferer.typevars
    settled: dict[int, list[tuple[Any, Any]]] = vars(network).setdefault("settled", {})
    for index, constraint in enumerate(network.constraints):
        before = settled.get(index)
        if before is not None and all(variable.type is known for variable, known in before):
            continue
        looked_up: list[Any] = []
        types.looked_up = looked_up
        try:
            constraint(inferer)
        except ForceLiteralArg as error:
            errors.append(error)
        except TypingError as error:
            shown = TypingError(str(error), loc=constraint.loc, highlighting=False)
            errors.append(chain_exception(shown, error))
        else:
            settled[index] = [(variable, variable.type) for variable in looked_up]
    types.looked_up = []
    return errors
