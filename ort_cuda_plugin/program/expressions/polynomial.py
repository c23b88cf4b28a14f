"""Polynomials with integer coefficients over symbols and opaque operations, such as ``4*n*m + floordiv(n, 3)``.

Other modules import the names of this module from `symbolic`, which contains the rest of symbolic arithmetic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias

from .operations import ExprOp

Dim: TypeAlias = "int | Expr"


def _truncdiv(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a >= 0) == (b >= 0) else -quotient


evaluators: Final[Mapping[ExprOp, Callable[..., int]]] = {
    ExprOp.ADD: lambda a, b: a + b,
    ExprOp.SUB: lambda a, b: a - b,
    ExprOp.MUL: lambda a, b: a * b,
    ExprOp.FLOORDIV: lambda a, b: a // b,
    ExprOp.MOD: lambda a, b: a % b,
    ExprOp.CEILDIV: lambda a, b: -(-a // b),
    ExprOp.MIN: min,
    ExprOp.MAX: max,
    ExprOp.EQ: lambda a, b: int(a == b),
    ExprOp.NE: lambda a, b: int(a != b),
    ExprOp.LT: lambda a, b: int(a < b),
    ExprOp.LE: lambda a, b: int(a <= b),
    ExprOp.AND: lambda a, b: int(a != 0 and b != 0),
    ExprOp.OR: lambda a, b: int(a != 0 or b != 0),
    ExprOp.SELECT: lambda c, a, b: a if c != 0 else b,
    ExprOp.TRUNCDIV: _truncdiv,
}
"""The operations on plain ints. A division by 0 raises ZeroDivisionError; evaluated in a Run, it fails the Run."""

boolean_ops: Final = frozenset((ExprOp.EQ, ExprOp.NE, ExprOp.LT, ExprOp.LE, ExprOp.AND, ExprOp.OR))
_divisions: Final = frozenset((ExprOp.FLOORDIV, ExprOp.MOD, ExprOp.CEILDIV, ExprOp.TRUNCDIV))

Bounds: TypeAlias = "tuple[int | None, int | None]"
"""(smallest, largest) possible value; None: unbounded."""


class Atom:
    """A symbol, or an operation that a polynomial cannot express. Immutable; ``==`` compares structure.

    A symbol has no ``op``; its ``args`` hold one number, which is unique within one plan. Operations can be nested as
    deeply as a model has layers, so no function of this module may recurse through all levels of them.
    """

    __slots__ = ("_hash", "args", "bounds", "hint", "is_read_back", "name", "op")

    def __init__(
        self, op: ExprOp | None, args: tuple[Dim, ...], hint: int, name: str = "", bounds: Bounds | None = None
    ) -> None:
        self.op = op
        self.args = args
        self.hint = hint
        self.name = name
        # Python hashes ints and tuples of ints in the same way in every process, so the order of terms is reproducible.
        self._hash = hash((-1 if op is None else int(op), args))
        if op is None:
            number = args[0]
            self.bounds = bounds or (None, None)
            self.is_read_back = isinstance(number, int) and number >= READ_BACK
        else:
            self.bounds = _clamped(_atom_bounds(op, args))
            self.is_read_back = any(map(is_read_back, args))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return _same(self, other) if isinstance(other, Atom) else NotImplemented

    def __repr__(self) -> str:
        return self.text(_SHOWN_DEPTH)

    def text(self, depth: int) -> str:
        """Format the atom, with ``...`` for operations that are nested deeper than ``depth``."""
        if self.op is None:
            return self.name or f"s{self.args[0]}"
        args = (arg.text(depth - 1) if isinstance(arg, Expr) else str(arg) for arg in self.args)
        return f"{self.op.name.lower()}({', '.join(args) if depth else '...'})"


def _same(a: Atom, b: Atom) -> bool:
    """Return whether two atoms have the same structure.

    If so, let both have the same argument objects, so that later comparisons are short.
    """
    pending, visited = [(a, b)], {(id(a), id(b))}
    for first, second in pending:
        if first._hash != second._hash or first.op != second.op or len(first.args) != len(second.args):
            return False
        for x, y in zip(first.args, second.args, strict=True):
            if isinstance(x, int) or isinstance(y, int):
                if x is not y and x != y:
                    return False
                continue
            if x is y:
                continue
            if x._hash != y._hash or x.const != y.const or len(x.terms) != len(y.terms):
                return False
            for (p, coefficient), (q, other_coefficient) in zip(x.terms, y.terms, strict=True):
                if coefficient != other_coefficient or len(p) != len(q):
                    return False
                for pair in zip(p, q, strict=True):
                    if pair[0] is not pair[1] and (key := (id(pair[0]), id(pair[1]))) not in visited:
                        visited.add(key)
                        pending.append(pair)
    for first, second in pending:
        second.args = first.args
    return True


Monomial: TypeAlias = tuple[Atom, ...]
"""A product of atoms, sorted by hash; a power repeats its atom."""

MAX_DEGREE: Final = 32
MAX_TERMS: Final = 256
"""Limits of a product of polynomials. A product beyond them, as in a chain of squares, becomes an opaque operation.

`MAX_DEGREE` is the maximum degree, `MAX_TERMS` the maximum of the factors' numbers of terms, multiplied.
"""

_SHOWN_DEPTH: Final = 2
_SHOWN_TERMS: Final = 6
"""Maximum nesting of operations, and maximum terms, in the text of an expression. The whole text may be exponentially
long, because it would repeat shared atoms.
"""

_HASH: Final = operator.attrgetter("_hash")
_LARGEST: Final = 2**64
"""Largest magnitude of an atom's hint and bounds; a Run computes sizes in 64 bits anyway."""


class Expr:
    """A polynomial that is not constant: ``const + sum(coefficient * monomial)``.

    ``hint`` is its value at the sizes that the plan is built for. Immutable and hashable; ``==`` compares structure. An
    Expr has no truth value and no order.
    """

    __slots__ = ("_bounds", "_hash", "_is_read_back", "const", "hint", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int, hint: int) -> None:
        self.terms = terms
        self.const = const
        self.hint = hint
        self._hash = hash((terms, const))
        self._bounds: Bounds | None = None
        self._is_read_back: bool | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Expr):
            return self._hash == other._hash and self.const == other.const and self.terms == other.terms
        return False if isinstance(other, int) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("a symbolic integer cannot be a condition of `if`; use ctx.known, ctx.guard or select")

    def __lt__(self, other: object) -> bool:
        raise TypeError("symbolic integers cannot be compared by <, <=, > or >=; use lt, le, sym_min or sym_max")

    __le__ = __gt__ = __ge__ = __lt__

    def __index__(self) -> int:
        raise TypeError(
            f"the size {self!r} is symbolic, expected an integer. Use a size that is known when the plan is built"
        )

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return self if other == 0 else Expr(self.terms, self.const + other, self.hint + other)
        if not isinstance(other, Expr):
            return NotImplemented
        terms = dict(self.terms)
        for monomial, coefficient in other.terms:
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _polynomial(terms, self.const + other.const, self.hint + other.hint)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple((m, -c) for m, c in self.terms), -self.const, -self.hint)

    def __sub__(self, other: Dim) -> Dim:
        if not isinstance(other, (int, Expr)):
            return NotImplemented
        return self + -other

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            if other == 0:
                return 0
            if other == 1:
                return self
            return Expr(tuple((m, c * other) for m, c in self.terms), self.const * other, self.hint * other)
        if not isinstance(other, Expr):
            return NotImplemented
        if len(self.terms) * len(other.terms) > MAX_TERMS or self._degree() + other._degree() > MAX_DEGREE:
            return operation(ExprOp.MUL, *((self, other) if hash(self) <= hash(other) else (other, self)))
        if len(self.terms) == len(other.terms) == 1 and not (self.const or other.const):  # most products of sizes
            ((monomial, coefficient),), ((factor, by),) = self.terms, other.terms
            return Expr(((_multiply(monomial, factor), coefficient * by),), 0, self.hint * other.hint)
        terms: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            if other.const:
                terms[monomial] = terms.get(monomial, 0) + coefficient * other.const
            for factor, by in other.terms:
                product_monomial = _multiply(monomial, factor)
                terms[product_monomial] = terms.get(product_monomial, 0) + coefficient * by
        if self.const:
            for factor, by in other.terms:
                terms[factor] = terms.get(factor, 0) + by * self.const
        return _polynomial(terms, self.const * other.const, self.hint * other.hint)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Dim:
        return floordiv(other, self)

    def __truediv__(self, other: object) -> NoReturn:
        raise TypeError("sizes are whole numbers: use // or ceildiv() in place of /")

    __rtruediv__ = __truediv__

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other)

    def __rmod__(self, other: int) -> Dim:
        return mod(other, self)

    @property
    def bounds(self) -> Bounds:
        """Return the provable bounds: interval arithmetic over the bounds of the symbols."""
        if self._bounds is None:
            self._bounds = _polynomial_bounds(self)
        return self._bounds

    @property
    def is_read_back(self) -> bool:
        """Return whether the value depends on read-back symbols. Cached, since many paths lead to a shared atom."""
        if self._is_read_back is None:
            self._is_read_back = any(atom.is_read_back for monomial, _ in self.terms for atom in monomial)
        return self._is_read_back

    def _degree(self) -> int:
        return max(len(monomial) for monomial, _ in self.terms)

    def __repr__(self) -> str:
        return self.text(_SHOWN_DEPTH)

    def text(self, depth: int) -> str:
        """Format the polynomial; ``...`` replaces all but its first terms, and operations deeper than ``depth``."""
        parts = []
        for monomial, coefficient in self.terms[:_SHOWN_TERMS]:
            factors = "*".join(atom.text(depth) for atom in monomial)
            parts.append(factors if coefficient == 1 else f"{coefficient}*{factors}")
        if len(self.terms) > _SHOWN_TERMS:
            parts.append("...")
        if self.const:
            parts.append(str(self.const))
        return "(" + " + ".join(parts) + ")" if len(parts) > 1 else parts[0]


def _monomial_key(monomial: Monomial) -> tuple[int, ...]:
    return tuple(atom._hash for atom in monomial)


def _multiply(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted(a + b, key=_HASH))


def _polynomial(terms: dict[Monomial, int], const: int, hint: int) -> Dim:
    kept = [(monomial, coefficient) for monomial, coefficient in terms.items() if coefficient]
    if not kept:
        return const
    if len(kept) > 1:
        kept.sort(key=lambda term: _monomial_key(term[0]))
    return Expr(tuple(kept), const, hint)


def symbol(number: int, name: str, hint: int, lower: int | None = 0, upper: int | None = None) -> Expr:
    """Return a new symbol with a unique ``number``. The caller ensures that its value is within the bounds."""
    return Expr((((Atom(None, (number,), hint, name, (lower, upper)),), 1),), 0, hint)


def is_const(dim: Dim) -> bool:
    return isinstance(dim, int)


READ_BACK = 2**32
"""Smallest number of the symbols whose values a Run reads back from the device, after the guards were evaluated."""


def is_read_back(dim: Dim) -> bool:
    """Return whether ``dim`` depends on values that the Run itself computes and reads back from the device."""
    return not isinstance(dim, int) and dim.is_read_back


def hint(dim: Dim) -> int:
    """Return the value of ``dim`` at the sizes that the plan is built for."""
    return dim if isinstance(dim, int) else dim.hint


def bounds(dim: Dim) -> Bounds:
    return (dim, dim) if isinstance(dim, int) else dim.bounds


# ---- bounds ----


def both(function: Callable[[int, int], int], x: int | None, y: int | None) -> int | None:
    """Return ``function`` of two bounds; None (unbounded) if one of them is None."""
    return None if x is None or y is None else function(x, y)


def tighter(function: Callable[[int, int], int], x: int | None, y: int | None) -> int | None:
    """Return ``function``, min or max, of two bounds of one value; if one of them is None, the other."""
    return y if x is None else x if y is None else function(x, y)


def _mul_bounds(a: Bounds, b: Bounds) -> Bounds:
    if a[0] is not None and a[1] is not None and b[0] is not None and b[1] is not None:
        corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
        return min(corners), max(corners)
    if a[0] is not None and a[0] >= 0 and b[0] is not None and b[0] >= 0:
        return a[0] * b[0], None
    return None, None


def _polynomial_bounds(expr: Expr) -> Bounds:
    total: Bounds = (expr.const, expr.const)
    for monomial, coefficient in expr.terms:
        product = monomial[0].bounds
        for atom in monomial[1:]:
            product = _mul_bounds(product, atom.bounds)
        low, high = (None if end is None else end * coefficient for end in product)
        low, high = (low, high) if coefficient > 0 else (high, low)
        total = both(int.__add__, total[0], low), both(int.__add__, total[1], high)
        if total == (None, None):
            break
    return total


def _clamped(bounds: Bounds) -> Bounds:
    """Return the bounds, limited to a magnitude of `_LARGEST`.

    Without a limit, the bounds of nested operations would have more digits at each level.
    """
    low, high = bounds
    return (
        None if low is None or low < -_LARGEST else min(low, _LARGEST),
        None if high is None or high > _LARGEST else max(high, -_LARGEST),
    )


def _atom_bounds(op: ExprOp, args: tuple[Dim, ...]) -> Bounds:
    if op in boolean_ops:
        return 0, 1
    if op is ExprOp.SELECT:
        a, b = bounds(args[1]), bounds(args[2])
        return both(min, a[0], b[0]), both(max, a[1], b[1])
    a, b = bounds(args[0]), bounds(args[1])
    if op is ExprOp.MUL:
        return _mul_bounds(a, b)
    if op is ExprOp.MIN:
        return both(min, a[0], b[0]), tighter(min, a[1], b[1])
    if op is ExprOp.MAX:
        return tighter(max, a[0], b[0]), both(max, a[1], b[1])
    divisor = args[1]
    if op is ExprOp.MOD:
        if b[0] is not None and b[0] > 0:
            return 0, None if b[1] is None else b[1] - 1
        return None, None
    if isinstance(divisor, int) and divisor > 0:
        evaluate_one = evaluators[op]
        return tuple(None if x is None else evaluate_one(x, divisor) for x in a)  # type: ignore[return-value]
    if a[0] is not None and a[0] >= 0 and b[0] is not None and b[0] >= 0:
        return 0, a[1]
    return None, None


# ---- operations ----


def operation(op: ExprOp, *args: Dim) -> Expr:
    hints = [hint(arg) for arg in args]
    # If the divisor's hint is 0, the result's hint is arbitrary, because a Run whose divisor is 0 fails.
    value = 0 if op in _divisions and hints[1] == 0 else evaluators[op](*hints)
    value = max(-_LARGEST, min(value, _LARGEST))
    return Expr((((Atom(op, args, value),), 1),), 0, value)


def _split(dividend: Expr, divisor: int) -> tuple[Dim, Dim]:
    """Return ``(quotient, rest)`` with ``dividend == divisor * quotient + rest``.

    Terms whose coefficients are multiples of the divisor go to the quotient, all others to the rest.
    """
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, coefficient in dividend.terms:
        target = rest if coefficient % divisor else quotient
        target[monomial] = coefficient
    multiple, left = divmod(dividend.const, divisor)
    if not quotient and not multiple:
        return 0, dividend
    divided = {monomial: coefficient // divisor for monomial, coefficient in quotient.items()}
    divided_hint, rest_hint = (sum(c * math.prod(a.hint for a in m) for m, c in x.items()) for x in (divided, rest))
    return _polynomial(divided, multiple, divided_hint + multiple), _polynomial(rest, left, rest_hint + left)


def _monomial_quotient(dividend: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(dividend)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _exact_quotient(dividend: Dim, divisor: Expr) -> Dim | None:
    """Return the polynomial q with ``dividend == q * divisor``; None if 64 steps of long division leave a remainder."""
    quotient: Dim = 0
    rest = dividend
    lead, lead_coefficient = max(divisor.terms, key=lambda term: (len(term[0]), _monomial_key(term[0])))
    for _ in range(64):
        if isinstance(rest, int):
            return quotient if rest == 0 else None
        top, top_coefficient = max(rest.terms, key=lambda term: (len(term[0]), _monomial_key(term[0])))
        factor = _monomial_quotient(top, lead)
        if factor is None or top_coefficient % lead_coefficient:
            return None
        times = top_coefficient // lead_coefficient
        step: Dim = Expr(((factor, times),), 0, times * math.prod(atom.hint for atom in factor)) if factor else times
        quotient = quotient + step
        rest = rest - step * divisor
    return None


def floordiv(a: Dim, b: Dim) -> Dim:
    """Return ``a / b`` rounded down. Raises ZeroDivisionError for a constant divisor of 0.

    Simplifications assume that a symbolic b is not 0 in any Run.
    """
    return _division(ExprOp.FLOORDIV, a, b)


def mod(a: Dim, b: Dim) -> Dim:
    """Return ``a % b`` with the sign of the divisor. Raises ZeroDivisionError for a constant divisor of 0."""
    return _division(ExprOp.MOD, a, b)


def ceildiv(a: Dim, b: Dim) -> Dim:
    """Return ``a / b`` rounded up. Raises ZeroDivisionError for a constant divisor of 0."""
    return _division(ExprOp.CEILDIV, a, b)


def _division(op: ExprOp, a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return evaluators[op](a, b)
    is_mod = op is ExprOp.MOD
    if isinstance(b, Expr):
        exact = _exact_quotient(a, b)
        return operation(op, a, b) if exact is None else 0 if is_mod else exact
    if b == 0:
        raise ZeroDivisionError(f"division of sizes by zero: {op.name.lower()}({a!r}, 0)")
    assert isinstance(a, Expr)
    if b < 0:
        return -_division(op, -a, -b) if is_mod else _division(op, -a, -b)
    if b == 1:
        return 0 if is_mod else a
    quotient, rest = _split(a, b)
    if isinstance(rest, int):
        return rest if is_mod else quotient + evaluators[op](rest, b)
    low, high = rest.bounds
    if op is not ExprOp.CEILDIV and low is not None and low >= 0 and high is not None and high < b:
        return rest if is_mod else quotient
    inner = single_atom(rest)
    if inner is not None and op is inner.op is ExprOp.FLOORDIV and isinstance(inner.args[1], int) and inner.args[1] > 0:
        return quotient + floordiv(inner.args[0], inner.args[1] * b)
    return operation(op, rest, b) if is_mod else quotient + operation(op, rest, b)


def truncdiv(a: Dim, b: Dim) -> Dim:
    """Return ``a / b`` rounded toward zero, as in C and ONNX's Div. Raises ZeroDivisionError for a constant b of 0."""
    if isinstance(a, int) and isinstance(b, int):
        return _truncdiv(a, b)
    if b == 0:
        raise ZeroDivisionError(f"division of sizes by zero: truncdiv({a!r}, 0)")
    if _at_least(a, 0) and _at_least(b, 0):
        return floordiv(a, b)
    if isinstance(b, Expr):
        exact = _exact_quotient(a, b)
    else:
        exact = floordiv(a, b) if divides(b, a) else None
    return operation(ExprOp.TRUNCDIV, a, b) if exact is None else exact


def single_atom(dim: Dim) -> Atom | None:
    if isinstance(dim, Expr) and not dim.const and len(dim.terms) == 1:
        monomial, coefficient = dim.terms[0]
        if coefficient == 1 and len(monomial) == 1:
            return monomial[0]
    return None


def _at_least(dim: Dim, value: int) -> bool:
    low = bounds(dim)[0]
    return low is not None and low >= value


def divides(divisor: int, dim: Dim) -> bool:
    """Return whether ``dim`` is provably a multiple of ``divisor``: all its coefficients are multiples."""
    if isinstance(dim, int):
        return dim % divisor == 0
    return dim.const % divisor == 0 and all(coefficient % divisor == 0 for _, coefficient in dim.terms)
