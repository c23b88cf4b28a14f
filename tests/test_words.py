"""Words that must not come back: private names and phrases for which the field has a term.

`words.txt` has the number of occurrences that are left, by word and folder. A number may only fall; a folder without
a number has no occurrence. ``python tests/test_words.py`` lowers the numbers to the present ones; it never raises one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("words.txt")
SUFFIXES = {".py", ".c", ".h", ".md"}
FOLDERS = ("ort_cuda_plugin", "csrc_shim", "tests", "bench", "docs")

WORDS = {
    "team": (r"(?i)(?<![a-z])teams?(?![a-z])", "a group of warps that shares k: sliced-K"),
    "twin": (r"(?i)(?<![a-z])twins?(?![a-z])", "a duplicate result (common subexpression elimination); a counterpart"),
    "alike": (r"(?<![a-z])alike(?![a-z])", "equal; structurally equal, for horizontal fusion"),
    "upright": (r"(?<![a-z])upright(?![a-z])", "a reduction over a strided axis"),
    "pieces of": (r"\bpieces? of\b", "16-byte chunks"),
    "single places": (r"\bsingle places?\b", "1x1 (pointwise) convolution"),
    "place": (
        r"(?<![a-z])(?<!in[ _-])(?<!take )(?<!takes )(?<!in its )places?(?![a-z])(?! of)",
        "an output pixel; an index; memory",
    ),
    "made of": (r"\b(?:is|are) made of\b", "consists of, is computed from"),
    "is no": (r"(?<!there )\b(?:is|are) no (?!longer|more|less)", "is not a; expected X, got Y"),
    "of which": (r"\bof which\b", "a sentence of its own"),
    "so many": (r"\bso many\b", "the quantity and its unit"),
    "what follows": (r"\bwhat follows\b", "the epilogue"),
    "walk over": (r"\bwalks? over\b", "online softmax; a loop over tiles"),
    "parts of k": (r"\b(?:parts? of k|along k,? added|cut along)\b", "split-K"),
    "whose places are apart": (r"\bplaces (?:are |that are )?apart\b", "strided output pixels"),
    "channels by themselves": (r"\bchannels? by (?:itself|themselves)\b", "depthwise convolution"),
    "images after the others": (r"\b(?:image_parts|some images after)\b", "batch tiling for L2 reuse"),
    "a GPU that is not there": (r"\bnot there\b", "a GPU that is only described; missing"),
    "nobody": (r"\b(?:no|some|any)body\b", "the actor: a thread, a step, the caller"),
    "British spelling": (
        r"(?i)(?:(?:optim|serial|initial|normal|recogn|minim|maxim|vector|parallel|synchron|quant|material|organ|penal|"
        r"factor|final|general|special|custom|categor|character|real|local|random|visual|canonical|util|summar)"
        r"is(?=e|ing|ation|able)|neighbour|behaviour|colour|favour|honour|centre|modell(?=ed|ing)|labell(?=ed|ing)|"
        r"cancell(?=ed|ing)|signall|travell|artefact|catalogue|licence|grey|analys(?:e[dr]?(?![a-z])|ing)|"
        r"fulfils?(?![a-z])|misspelt|learnt|whilst)",
        "the American spelling, as CUDA and ONNX Runtime write",
    ),
    "model of GPUs": (r"\bmodel of (?:a |the )?GPUs?\b", "the performance model"),
}
"""For each word, a pattern and the terms to use instead. In names, an underscore ends a word."""

MODULES = frozenset(
    (
        *(
            "alike",
            "attend",
            "bundle",
            "cells",
            "chained",
            "compact_weights",
            "contract",
            "halves",
            "image_order",
        ),
        *("image_parts", "kept", "lanes", "matrix_conv", "matrix_product", "matrix_stream", "matrix_tiles", "merge"),
        *("merged_products", "merged_convolutions", "narrow", "recompute", "recurrent_parts", "recurrent_strips"),
        *("row_moves", "row_product", "row_sums", "spread", "strip_conv", "teams", "twins", "upright"),
    )
)
"""Names of modules for which the field has a term, such as ``horizontal_fusion`` for ``bundle``."""

MAY_STAY = {
    "tests/test_words.py": "it lists the words",
    "CHANGELOG.md": "it tells of versions that had the words",
    "docs/operators.md": "a command writes it from docstrings of operators",
}
"""Files that are not searched, and the reason."""


def room(path: Path) -> str:
    """Return the folder under which a file is counted: its folder within the package or csrc_shim, else the first one
    of its path.
    """
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if parts[0] in ("ort_cuda_plugin", "csrc_shim") and len(parts) > 2 else 1])


def files() -> Iterable[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def occurrences(text: str) -> Counter[str]:
    """Return how often each word is in a text."""
    return Counter({word: found for word, (pattern, _) in WORDS.items() if (found := len(re.findall(pattern, text)))})


@cache
def present() -> Counter[tuple[str, str]]:
    """Return the number of occurrences by word and folder."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in files():
        if str(path.relative_to(ROOT)) not in MAY_STAY and "__pycache__" not in path.parts:
            for word, found in occurrences(path.read_text()).items():
                counts[word, room(path)] += found
    return counts


def allowed() -> dict[tuple[str, str], int]:
    rows = (line.split("\t") for line in TABLE.read_text().splitlines())
    return {(word, folder): int(count) for word, folder, count in rows}


def test_no_word_is_used_more_often() -> None:
    limits = allowed()
    more = [
        f"{folder}: {count} x {word!r}, expected at most {limits.get((word, folder), 0)}. Say {WORDS[word][1]}"
        for (word, folder), count in sorted(present().items())
        if count > limits.get((word, folder), 0)
    ]
    assert more == []


def test_the_table_has_words_and_folders_that_exist() -> None:
    assert [row for row in allowed() if row[0] not in WORDS or not (ROOT / row[1]).exists()] == []


def test_no_module_has_a_private_name() -> None:
    assert [str(path) for path in files() if path.stem.removeprefix("test_") in MODULES] == []


def test_words_are_found_in_names_and_in_sentences() -> None:
    found = occurrences(
        "def most_teams(place0): # a value that is no size, of which so many are alike\n    takes place"
    )
    assert found == {"team": 1, "place": 1, "is no": 1, "of which": 1, "so many": 1, "alike": 1}


def test_british_spelling_is_found_in_names_and_sentences() -> None:
    found = occurrences("OPTIMISATION_LEVEL neighbours_of un_initialised Quantising # a grey catalogue was analysed")
    assert found == {"British spelling": 7}
    assert not occurrences("parallelism, a premise, analyses, expertise, characteristic, optimized, raised, generalist")


def lower() -> None:
    """Lower the numbers of the table to the present ones."""
    counts, limits = present(), allowed() if TABLE.exists() else None
    rows = sorted(
        (word, folder, count if limits is None else min(count, limits.get((word, folder), 0)))
        for (word, folder), count in counts.items()
    )
    TABLE.write_text("".join(f"{word}\t{folder}\t{count}\n" for word, folder, count in rows if count))


if __name__ == "__main__":
    lower()
