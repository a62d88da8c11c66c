"""Writes the tokenizer's Unicode tables from the library that vocabularies are trained with.

`python scripts/make_unicode_tables.py` rewrites
`rust/distributed-inference/src/tokenizer/unicode_tables.rs`; with `--check` it only compares.
Every code point is put through `tokenizers` itself, so that the engine's classes are the library's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import Digits, Split

TABLES = Path(__file__).resolve().parent.parent / "rust/distributed-inference/src/tokenizer/unicode_tables.rs"

CODE_POINTS = [*range(0xD800), *range(0xE000, 0x110000)]
CHUNK = 4096
OTHER, LETTER, NUMBER, SPACE = range(4)

# How many code points each version of Unicode leaves unassigned.
UNASSIGNED = {829_834: "14.0", 825_345: "15.0", 824_718: "15.1", 819_533: "16.0", 814_730: "17.0"}


def matching(pattern: str) -> set[int]:
    """Code points that the library's regular expressions count as `pattern`."""
    split = Split(Regex(pattern), "removed")
    found: set[int] = set()
    for start in range(0, len(CODE_POINTS), CHUNK):
        chunk = CODE_POINTS[start : start + CHUNK]
        kept = split.pre_tokenize_str("".join(map(chr, chunk)))
        found.update(chunk)
        found.difference_update(ord(char) for piece, _ in kept for char in piece)
    return found


def digits() -> set[int]:
    """Code points that the library's `Digits` step isolates."""
    split = Digits(individual_digits=True)
    found: set[int] = set()
    for start in range(0, len(CODE_POINTS), CHUNK):
        text = "a" + "a".join(map(chr, CODE_POINTS[start : start + CHUNK])) + "a"
        # Only an isolated digit leaves a piece of one character at an odd place.
        for _, (begin, end) in split.pre_tokenize_str(text):
            if end - begin == 1 and begin % 2:
                found.add(ord(text[begin]))
    return found


def ranges(points: set[int]) -> list[tuple[int, int]]:
    """Inclusive ranges of neighbouring code points."""
    found: list[tuple[int, int]] = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return found


def boundaries() -> list[int]:
    """`start << 2 | class` for each stretch of one class, from code point 0 on."""
    kinds = bytearray(0x110000)
    for kind, pattern in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s")):
        for point in matching(pattern):
            kinds[point] = kind
    return [point << 2 | kind for point, kind in enumerate(kinds) if point == 0 or kind != kinds[point - 1]]


def version() -> str:
    """The version of Unicode that the library's regular expressions know."""
    return UNASSIGNED.get(len(matching(r"\p{Cn}")), "unknown")


def rust() -> str:
    """The generated file."""
    entries = boundaries()
    extra = ranges(digits() - matching(r"\p{N}"))
    lines = [
        "//! Made by `scripts/make_unicode_tables.py` from the `tokenizers` library: do not edit.",
        "",
        f"/// The Unicode version of `\\p{{L}}`, `\\p{{N}}` and `\\s`: {version()}.",
        "///",
        "/// Each entry starts a stretch of code points of one class: `start << 2 | class`, where the",
        "/// class is 0 other, 1 letter, 2 number, 3 white space.",
        "#[rustfmt::skip]",
        f"pub(super) static BOUNDARIES: [u32; {len(entries)}] = [",
    ]
    line = "   "
    for entry in entries:
        item = f" 0x{entry:x},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    lines += [
        line,
        "];",
        "",
        "/// Numbers that the library's digit splitter, built on a newer Unicode, knows and its regular",
        "/// expressions do not yet.",
        f"pub(super) static NEWER_DIGITS: [(u32, u32); {len(extra)}] = [",
        *(f"    (0x{start:x}, 0x{end:x})," for start, end in extra),
        "];",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the table, or with `--check` says whether it is what would be written."""
    text = rust()
    if "--check" in sys.argv[1:]:
        if TABLES.read_text() == text:
            return 0
        print(f"{TABLES.name} is not what {Path(__file__).name} makes: run it", file=sys.stderr)
        return 1
    TABLES.write_text(text)
    print(f"wrote {TABLES.name}: Unicode {version()}, {len(boundaries())} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
