"""Parser of PTX: text -> variables, and functions with their instructions.

The grammar is that of section 4 (Syntax) of the PTX ISA. Directives without an effect on results (``.file``, ``.loc``,
``.section``, ``.pragma``, performance directives) are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...abi.errors import Error


class PtxError(Error):
    """PTX that cannot be translated. The message has the line, the instruction, and what is wrong with it."""

    def __init__(self, line: int, text: str, reason: str) -> None:
        super().__init__(f"PTX line {line}, `{text}`: {reason}")
        self.line, self.text, self.reason = line, text, reason


# ---- operands ----


@dataclass(frozen=True)
class Register:
    """A name: of a register, a special register, a variable, a function or a label. ``negated`` is the ``!`` of a
    predicate.
    """

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A number. For a float, ``bits`` are its bits and ``width`` is their number; for an integer, ``width`` is 0."""

    bits: int
    width: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; ``base`` is "" for an absolute address."""

    base: str
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """Several operands: ``{a, b}`` is a vector, ``(a, b)`` are arguments, ``a|b`` are two destinations."""

    kind: str
    items: tuple[Operand, ...]


Operand: TypeAlias = Register | Immediate | Address | Group


# ---- statements ----


@dataclass(frozen=True)
class Variable:
    """A variable: its state space, element type, and number of elements (1 without brackets; 0 if the launch sets the
    size).

    ``initial`` has the elements of an initializer: numbers, or (symbol, offset) for addresses. ``is_pointer``: a
    kernel's parameter has the attribute ``.ptr``. A part of a parameter has the parameter's name in ``whole``, and its
    byte offset in ``offset``. ``linkage`` is the linking directive of a module's variable, such as ``.extern``, or "".
    """

    space: str
    type: str
    name: str
    count: int
    alignment: int
    initial: tuple[int | tuple[str, int], ...] = ()
    line: int = 0
    is_pointer: bool = False
    whole: str = ""
    offset: int = 0
    linkage: str = ""

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.count * type_bytes(self.type)


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Instruction:
    """An instruction: ``opcode`` without modifiers, ``modifiers`` in order, guard predicate (or None), and operands."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str

    def error(self, reason: str) -> PtxError:
        return PtxError(self.line, self.text, reason)

    def has(self, *names: str) -> bool:
        """Return whether one of the modifiers is among ``names``."""
        return any(name in self.modifiers for name in names)


@dataclass
class Function:
    """A kernel (``is_entry``) or device function. ``registers`` maps each register to its type.

    Names from nested scopes are made unique. ``tables`` are the targets of indirect branches, by label. A kernel's
    ``arguments`` are its parameters as declared; in ``parameters``, structures are split into words. ``linkage`` is as
    in `Variable`.
    """

    name: str
    is_entry: bool
    results: list[Variable]
    parameters: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Label | Instruction] = field(default_factory=list)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_defined: bool = False
    line: int = 0
    arguments: tuple[Variable, ...] = ()
    linkage: str = ""


@dataclass
class Module:
    """A module. With ``check``, accesses are checked when the code runs on the emulated device."""

    target: str = ""
    check: bool = False
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)


def function_address(module: Module, name: str) -> int:
    """Return the address by which indirect calls find a function. No device memory has such an address."""
    return 0x0F00_0000_0000_0000 + 16 * list(module.functions).index(name)


def names_in(operand: Operand) -> Iterator[str]:
    """Yield the names of registers, variables and functions in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        yield operand.base
    elif isinstance(operand, Group):
        for item in operand.items:
            yield from names_in(item)


def reachable(module: Module, kernel: str) -> list[Function]:
    """Return the kernel, and all functions that it may call, directly or indirectly, by name or by address."""
    found: dict[str, Function] = {}
    pending = [kernel]
    while pending:
        name = pending.pop()
        if name in module.variables:
            pending += [each[0] for each in module.variables[name].initial if isinstance(each, tuple)]
        if name in found or name not in module.functions:
            continue
        found[name] = module.functions[name]
        pending += function_names(found[name])
    return list(found.values())


def function_names(function: Function) -> set[str]:
    """Return all names in the operands of a function's instructions."""
    instructions = [item for item in function.body if isinstance(item, Instruction)]
    return {name for each in instructions for operand in each.operands for name in names_in(operand)}


def type_bytes(ty: str) -> int:
    """Return the size in bytes of a fundamental type such as ``f32`` or ``b8x2``. Raises ValueError for other names."""
    if ty == "pred":
        return 1
    match = re.fullmatch(r"(?:[busfe]|bf|tf)(\d+)(?:x(\d))?", ty)
    if match is None:
        raise ValueError(ty)
    return int(match[1]) // 8 * int(match[2] or 1)


def words_of(parameter: Variable) -> list[Variable]:
    """Return a kernel's parameter as words of 8, 4, 2 or 1 bytes, the only sizes in the emulator's launch record."""
    if parameter.count == 1 and parameter.size <= 8:
        return [parameter]
    words, offset = [], 0
    while offset < parameter.size:
        size = next(each for each in (8, 4, 2, 1) if each <= parameter.size - offset)
        name = f"{parameter.name}+{offset}"
        words.append(
            Variable("param", f"b{8 * size}", name, 1, size, (), parameter.line, False, parameter.name, offset)
        )
        offset += size
    return words


def set_arguments(function: Function) -> None:
    """Split the parameters of a kernel into words."""
    if function.is_entry:
        function.arguments = tuple(function.parameters)
        function.parameters = [word for parameter in function.parameters for word in words_of(parameter)]


# ---- tokens ----

comments = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
token_pattern = re.compile(
    r"\s*(?:(?P<string>\"[^\"]*\")"
    r"|(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)"
    r"|(?P<word>[.]?[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)"
    r"|(?P<mark>[@!,;:{}()\[\]<>|+\-=]))"
)
line_directives = re.compile(r"^[ \t]*\.(?:loc|file|version|address_size|pragma)\b[^\n]*$", re.MULTILINE)
target_directive = re.compile(r"^[ \t]*\.target\s+([^\n]*)$", re.MULTILINE)
linking = {".visible", ".extern", ".weak", ".common"}
spaces = {".global", ".const", ".shared", ".local", ".param"}
performance = {".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn", ".blocksareclusters"}
performance |= {".reqnctapercluster", ".maxclusterrank", ".explicitcluster", ".abi_preserve", ".abi_preserve_control"}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    start: int


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of PTX whose comments and skipped lines have been removed. Raises PtxError."""
    position, line, counted = 0, 1, 0
    end = len(text.rstrip())
    while position < end:
        match = token_pattern.match(text, position)
        if match is None or match.lastgroup is None:
            line += text.count("\n", counted, position)
            raise PtxError(line, text[position : position + 20].strip().split("\n")[0], "not a PTX token")
        start = match.start(match.lastgroup)
        line += text.count("\n", counted, start)
        counted = start
        word = match[match.lastgroup]
        if word[0] == "." and "." in word[1:]:  # ".reg.b32" is two directives
            for part in word[1:].split("."):
                yield Token("word", f".{part}", line, start)
                start += len(part) + 1
        else:
            yield Token(match.lastgroup, word, line, start)
        position = match.end()


def _blank(match: re.Match[str]) -> str:
    """Return the line breaks of a comment, so that errors keep the right line numbers; a space if it has none."""
    return "\n" * match[0].count("\n") or " "


def number(text: str) -> Immediate:
    """Return the immediate for a number token."""
    kind = text[:2].lower()
    if kind == "0f":
        return Immediate(int(text[2:], 16), 32)
    if kind == "0d":
        return Immediate(int(text[2:], 16), 64)
    digits = text.removesuffix("U")
    return Immediate(int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0))


# ---- the parser ----


class Parser:
    """A recursive-descent parser for one module. Its methods raise PtxError for malformed text."""

    def __init__(self, text: str) -> None:
        self.text = line_directives.sub("", comments.sub(_blank, text))
        self.module = Module()
        if match := target_directive.search(self.text):
            self.module.target = match[1].split(",")[0].strip()
        self.text = target_directive.sub("", self.text)
        self.tokens = list(tokens(self.text))
        self.position = 0
        self.scopes: list[dict[str, str]] = []
        self.unique = 0

    # tokens

    @property
    def next(self) -> Token:
        if self.position == len(self.tokens):
            raise PtxError(self.text.count("\n") + 1, "end of the text", "the last statement is incomplete")
        return self.tokens[self.position]

    def take(self, text: str = "") -> Token:
        """Return the next token and advance. Raises PtxError if ``text`` is given and the token differs."""
        token = self.next
        if text and token.text != text:
            raise PtxError(token.line, token.text, f"expected {text!r}")
        self.position += 1
        return token

    def accept(self, *texts: str) -> bool:
        """Advance if the next token is one of ``texts``; return whether it was."""
        found = self.position < len(self.tokens) and self.next.text in texts
        self.position += found
        return found

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.take()
        if token.kind != "number":
            raise PtxError(token.line, token.text, "expected an integer")
        return sign * number(token.text).bits

    def up_to(self, end: str) -> None:
        """Skip tokens up to and including ``end``, and whole blocks in braces."""
        while not self.accept(end):
            if self.take().text == "{":
                self.up_to("}")

    # module

    def parse(self) -> Module:
        while self.position < len(self.tokens):
            self.statement_of_module()
        return self.module

    def statement_of_module(self) -> None:
        token, linkage = self.take(), ""
        while token.text in linking:
            linkage, token = token.text, self.take()
        if token.text in (".entry", ".func"):
            self.function(token, linkage)
        elif token.text in spaces:
            variable = replace(self.variable(token), linkage=linkage)
            self.take(";")
            declare(self.module, variable)
        elif token.text == ".section":
            self.take()
            self.take("{")
            self.up_to("}")
        elif token.text == ".alias":
            self.up_to(";")
        elif token.text != ";":
            raise PtxError(token.line, token.text, "unknown directive")

    def variable(self, space: Token) -> Variable:
        """Parse a variable such as ``.align 16 .b8 name[64] = {...}``, after its state space."""
        alignment, ty, words, is_pointer = 0, "", 1, False
        while self.next.text.startswith("."):
            word = self.take()
            if word.text == ".align":
                alignment = self.integer()
            elif word.text == ".ptr":
                is_pointer = True
                while self.next.text in (*spaces, ".align"):
                    if self.take().text == ".align":
                        self.integer()
            elif word.text in (".v2", ".v4"):
                words = int(word.text[2:])
            elif word.text.startswith(".attribute"):
                self.up_to(")")
            else:
                ty = word.text[1:]
        name = self.take()
        count = 1
        while self.accept("["):
            count *= 0 if self.next.text == "]" else self.integer()
            self.take("]")
        initial: tuple[int | tuple[str, int], ...] = ()
        if self.accept("="):
            initial = tuple(self.initial_values())
            count = count or len(initial)
        try:
            size = type_bytes(ty)
        except ValueError:
            raise PtxError(name.line, name.text, f"unknown type {ty!r}") from None
        alignment = max(alignment, size * words)
        return Variable(space.text[1:], ty, name.text, count * words, alignment, initial, space.line, is_pointer)

    def initial_values(self) -> Iterator[int | tuple[str, int]]:
        if self.accept("{"):
            while not self.accept("}"):
                yield from self.initial_values()
                self.accept(",")
            return
        if self.next.kind == "word":
            name = self.take().text
            if name == "generic":
                self.take("(")
                name = self.take().text
                self.take(")")
            yield (name, self.integer() if self.accept("+") else 0)
            return
        yield self.integer()

    def parameters(self) -> list[Variable]:
        """Parse a list of parameters such as ``(.param .u64 a, .param .b32 b)``."""
        found: list[Variable] = []
        self.take("(")
        while not self.accept(")"):
            space = self.take()
            if space.text not in (".param", ".reg"):
                raise PtxError(space.line, space.text, "expected .param or .reg")
            found.append(self.variable(space))
            self.accept(",")
        return found

    # functions

    def function(self, start: Token, linkage: str) -> None:
        results = self.parameters() if start.text == ".func" and self.next.text == "(" else []
        name = self.take()
        parameters = self.parameters() if self.next.text == "(" else []
        function = Function(name.text, start.text == ".entry", results, parameters, line=name.line, linkage=linkage)
        set_arguments(function)
        while self.next.text in performance:
            self.take()
            while self.next.kind == "number" or self.next.text == ",":
                self.take()
        if not self.accept(";"):
            function.is_defined = True
            self.scopes = [{}]
            for variable in (*results, *parameters):
                if variable.space == "reg":
                    function.registers[variable.name] = variable.type
            self.take("{")
            while not self.accept("}"):
                self.statement(function)
        known = self.module.functions.get(function.name)
        if known is None or not known.is_defined:
            self.module.functions[function.name] = function

    def statement(self, function: Function) -> None:
        token = self.next
        if self.accept("{"):
            self.scopes.append({})
            while not self.accept("}"):
                self.statement(function)
            self.scopes.pop()
        elif token.text == ".reg":
            self.take()
            self.registers(function)
        elif token.text in spaces:
            self.take()
            variable = self.variable(token)
            self.take(";")
            function.variables.append(replace(variable, name=self.declared(variable.name)))
        elif token.text == ".callprototype" or token.text.startswith(".pragma"):
            self.up_to(";")
        elif token.kind == "word" and self.tokens[self.position + 1].text == ":":
            self.take()
            self.take(":")
            self.after_label(function, token.text)
        elif not self.accept(";"):
            function.body.append(self.instruction())

    def after_label(self, function: Function, name: str) -> None:
        if self.accept(".branchtargets"):
            targets = [self.take().text]
            while self.accept(","):
                targets.append(self.take().text)
            self.take(";")
            function.tables[name] = tuple(targets)
        elif self.accept(".callprototype"):
            self.up_to(";")
        else:
            function.body.append(Label(name))

    def declared(self, name: str) -> str:
        """Return a name that is unique in the function, for the name that the innermost scope declares."""
        if len(self.scopes) == 1:
            return self.scopes[0].setdefault(name, name)
        self.unique += 1
        self.scopes[-1][name] = f"{name}.scope{self.unique}"
        return self.scopes[-1][name]

    def resolved(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def registers(self, function: Function) -> None:
        """Parse a declaration of registers such as ``.reg .b32 %r<9>, x;``, after ``.reg``."""
        ty = self.take().text[1:]
        while True:
            name = self.take().text
            if self.accept("<"):
                names = [f"{name}{index}" for index in range(self.integer())]
                self.take(">")
            else:
                names = [name]
            for each in names:
                function.registers[self.declared(each)] = ty
            if not self.accept(","):
                break
        self.take(";")

    def instruction(self) -> Instruction:
        start = self.next
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            guard = Register(self.resolved(self.take().text), negated)
        word = self.take()
        if word.kind != "word":
            raise PtxError(word.line, word.text, "expected an instruction")
        opcode, *modifiers = word.text.split(".")
        operands: list[Operand] = []
        if self.next.text != ";":
            operands.append(self.operand())
            while self.accept(","):
                operands.append(self.operand())
        end = self.take(";")
        text = " ".join(self.text[start.start : end.start].split())
        return Instruction(opcode, tuple(modifiers), tuple(operands), guard, word.line, text)

    # operands

    def operand(self) -> Operand:
        first = self.single()
        if self.accept("|"):
            return Group("|", (first, self.single()))
        return first

    def single(self) -> Operand:
        token = self.take()
        if token.text == "{":
            return Group("{", self.items("}"))
        if token.text == "(":
            return Group("(", self.items(")"))
        if token.text == "[":
            return self.address()
        if token.text == "!":
            return Register(self.resolved(self.take().text), True)
        if token.text == "-":
            value = number(self.take().text)
            return (
                Immediate(-value.bits)
                if value.width == 0
                else Immediate(value.bits ^ 1 << value.width - 1, value.width)
            )
        if token.kind == "number":
            return number(token.text)
        if token.kind != "word":
            raise PtxError(token.line, token.text, "expected an operand")
        name = self.resolved(token.text)
        if self.next.text in ("+", "-"):  # the address of a variable in mov
            return Address(name, self.offset())
        return Register(name)

    def items(self, end: str) -> tuple[Operand, ...]:
        items: list[Operand] = []
        while not self.accept(end):
            items.append(self.operand())
            self.accept(",")
        return tuple(items)

    def offset(self) -> int:
        total = 0
        while self.next.text in ("+", "-"):
            sign = -1 if self.take().text == "-" else 1
            total += sign * self.integer()
        return total

    def address(self) -> Address:
        name = self.resolved(self.take().text) if self.next.kind == "word" else ""
        found = Address(name, self.offset() if name else self.integer())
        self.take("]")
        return found


def declare(module: Module, variable: Variable) -> None:
    """Add a variable to the module; a definition replaces a declaration."""
    known = module.variables.get(variable.name)
    if known is None or known.linkage == ".extern":
        module.variables[variable.name] = variable


def parse(text: str) -> Module:
    """Parse a PTX module. Raises PtxError."""
    return Parser(text).parse()
