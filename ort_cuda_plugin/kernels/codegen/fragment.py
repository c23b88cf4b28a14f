"""Fragments of kernel source with declared names, and the check that they fit together.

A kernel body is a list of fragments: the block's tile, the offset of its batch, its accumulators, the loop over k, the
epilogue. A fragment reads variables of the fragments before it and the kernel's parameters. Only the variables that a
fragment declares in ``gives`` are visible to later fragments; others are local. With ``ORT_CUDA_PLUGIN_VERIFY=1``, as
in the tests, `join` checks this. So a missing variable raises an error that names the fragment, rather than a Numba
error in a source of a thousand lines.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from ...abi.errors import Error
from ...program.analysis.verify import is_wanted

_EVERYWHERE = frozenset({"cuda", "libdevice", "math", "range", "float32", "float64"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Names that a kernel may use as values without a definition. Called names (intrinsics) need no entry."""

_CALL = ("args", "keywords")
"""Fields of `ast.Call` except ``func``, the called function."""


class FragmentError(Error, ValueError):
    """A fragment reads an undefined name, or does not assign a name that it declares: a bug of the plugin."""


@dataclass(frozen=True)
class Fragment:
    """Source lines of any indentation; ``gives`` lists the names that later fragments may read."""

    name: str
    text: str
    gives: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines without their common indentation."""
        return textwrap.dedent(self.text).strip("\n").splitlines()


class Body(str):
    """A kernel's body. ``needs`` maps each name that must be a parameter to the first fragment that reads it.

    ``needs`` is empty if verification is off.
    """

    needs: Mapping[str, str]

    def __new__(cls, text: str, needs: Mapping[str, str]) -> Body:
        body = super().__new__(cls, text)
        body.needs = needs
        return body


def join(fragments: Iterable[Fragment]) -> Body:
    """Return the body of a kernel that consists of ``fragments``.

    Raises:
        FragmentError: with verification, if a fragment reads a local name of an earlier fragment, or does not assign a
            name that it declares.
    """
    fragments = list(fragments)
    text = "\n".join(textwrap.indent(textwrap.dedent(x.text).strip("\n"), "    ") for x in fragments)
    return Body(text, _needs(fragments) if is_wanted() else {})


@cache
def check_parameters(kernel: str, body: str, parameters: tuple[str, ...]) -> None:
    """Raise FragmentError if ``body`` reads a name that is neither its own nor among the kernel's parameters."""
    needs = body.needs if isinstance(body, Body) else _needs([Fragment("body", body)])
    for name, fragment in needs.items():
        if name not in parameters:
            raise FragmentError(
                f"kernel {kernel}: fragment {fragment}: {name!r} is undefined: got parameters {', '.join(parameters)}. "
                f"Assign it in an earlier fragment that declares it in ``gives``, or add a parameter"
            )


def _needs(fragments: Iterable[Fragment]) -> dict[str, str]:
    """Return the names that no fragment assigns, each with the first fragment that reads it. Raises FragmentError."""
    given: set[str] = set()
    local: dict[str, str] = {}
    needs: dict[str, str] = {}
    for fragment in fragments:
        assigned: set[str] = set()
        for name in _reads(ast.parse(textwrap.dedent(fragment.text)).body, assigned):
            if name in given:
                continue
            if name in local:
                raise FragmentError(
                    f"fragment {fragment.name}: {name!r} is a local name of fragment {local[name]}. "
                    f"Declare it in ``gives`` of {local[name]}"
                )
            needs.setdefault(name, fragment.name)
        declared = set(fragment.gives.split())
        for name in sorted(declared - assigned):
            raise FragmentError(
                f"fragment {fragment.name}: {name!r} is declared in ``gives``, not assigned. Assign it or remove it"
            )
        given |= declared
        local |= dict.fromkeys(assigned - given, fragment.name)
    return needs


def _reads(statements: Iterable[ast.stmt], assigned: set[str]) -> Iterator[str]:
    """Yield the names that statements read before any assignment; add the names that they assign to ``assigned``."""
    for statement in statements:
        match statement:
            case ast.For(target=target, iter=value, body=body, orelse=orelse):
                yield from _names(value, assigned)
                yield from _names(target, assigned)
                yield from _reads((*body, *orelse), assigned)
            case ast.While(test=value, body=body, orelse=orelse) | ast.If(test=value, body=body, orelse=orelse):
                yield from _names(value, assigned)
                yield from _reads((*body, *orelse), assigned)
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                yield from _names(value, assigned)
                yield from {name} - assigned
            case ast.Assign(targets=targets, value=value):
                yield from _names(value, assigned)
                for target in targets:
                    yield from _names(target, assigned)
            case _:
                yield from _names(statement, assigned)


def _names(node: ast.AST, assigned: set[str]) -> Iterator[str]:
    # `ast.walk` would be slower, and tests check every launch.
    pending = [node]
    while pending:
        x = pending.pop()
        if isinstance(x, ast.Name):
            if x.id in _EVERYWHERE:
                continue
            if isinstance(x.ctx, ast.Store):
                assigned.add(x.id)
            elif x.id not in assigned:
                yield x.id
        else:
            pending += _parts(x)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the child nodes of a node, the last one first, except the name of a called function."""
    fields = _CALL if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else node._fields
    for name in reversed(fields):
        part = getattr(node, name, None)
        if isinstance(part, list):
            yield from (x for x in reversed(part) if isinstance(x, ast.AST) and x._fields)
        elif isinstance(part, ast.AST) and part._fields:
            yield part
