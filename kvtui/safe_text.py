"""Untrusted text made safe to draw: prompts, outputs, names, log lines, anything out of a recording.

What comes out holds no control character, no bidirectional override and no sequence whose width terminals disagree on,
so it can neither reach the terminal as a command nor push a border out of line. Widths are in terminal cells. The rule
for a character is conservative: it is kept only where Rich's table and Unicode's East Asian Width agree on its width
and it combines with no neighbour; emoji sequences are taken apart into the emoji they consist of.

`fit` and `wrap` look at no more text than they can show, so a prompt of a hundred megabytes costs what a line costs.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Literal

from rich.cells import cell_len, get_character_cell_size

ELLIPSIS = "…"
ASCII_ELLIPSIS = "~"

SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>")
"""A token that is no text, such as `<|im_start|>`."""

_REPLACEMENT = "\ufffd"
_MARKS_PER_LETTER = 2
_SCAN_PER_CELL = 8
_SCAN_EXTRA = 64

_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\x85": "⏎", "\u2028": "⏎", "\u2029": "⏎"}
_VISIBLE_ASCII = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\x7f": "^?", "\x85": "\\n", "\u2028": "\\n", "\u2029": "\\n"}
_ASCII_TABLE = {code: chr(0x2400 + code) for code in range(0x20)} | {ord(c): v for c, v in _VISIBLE.items()}
_ASCII_FOLD = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "•": "*", "×": "x", "\xa0": " "}


def clean(text: str, *, ascii_only: bool = False, limit: int = 4096) -> str:
    """Safe text on one line, with line breaks, tabs and control characters shown as symbols.

    Args:
        text: Anything at all, lone surrogates included.
        ascii_only: Use no character outside printable ASCII.
        limit: Most characters of `text` that are looked at; an ellipsis stands for the rest.
    """
    cut = len(text) > limit
    safe = "".join(_units(text[:limit] if cut else text, ascii_only))
    return safe + _ellipsis(ascii_only) if cut else safe


def width(safe: str) -> int:
    """Cells that text from this module takes."""
    return len(safe) if safe.isascii() else cell_len(safe)


def fit(
    text: str,
    cells: int,
    *,
    keep: Literal["head", "tail"] = "head",
    align: Literal["left", "right"] = "left",
    ascii_only: bool = False,
) -> str:
    """Safe text exactly so many cells wide: padded with spaces, or cut with an ellipsis on the side that is lost.

    Args:
        text: Anything at all.
        cells: Width of the result; 0 or less gives an empty string.
        keep: Which end survives where the text is too long.
        align: Where the text stands where it is too short.
        ascii_only: Use no character outside printable ASCII.
    """
    if cells <= 0:
        return ""
    if len(text) <= cells and text.isascii() and text.isprintable():
        return text.ljust(cells) if align == "left" else text.rjust(cells)
    scan = cells * _SCAN_PER_CELL + _SCAN_EXTRA
    cut = len(text) > scan
    if cut:
        text = text[:scan] if keep == "head" else text[-scan:]
    if text.isascii() and not ascii_only:
        return _fit_narrow(text.translate(_ASCII_TABLE), cells, keep, align)
    units = _units(text, ascii_only)
    total = sum(map(_unit_width, units))
    if not cut and total <= cells:
        safe = "".join(units)
        padding = " " * (cells - total)
        return safe + padding if align == "left" else padding + safe
    kept, used = _take(units if keep == "head" else units[::-1], cells - 1)
    # A wide character that does not fit leaves one cell open; it is filled beside the ellipsis.
    padding = " " * (cells - 1 - used)
    if keep == "head":
        return "".join(kept) + _ellipsis(ascii_only) + padding
    return padding + _ellipsis(ascii_only) + "".join(reversed(kept))


def _fit_narrow(safe: str, cells: int, keep: str, align: str) -> str:
    """Fit safe text whose characters all take one cell."""
    if len(safe) <= cells:
        return safe.ljust(cells) if align == "left" else safe.rjust(cells)
    return safe[: cells - 1] + ELLIPSIS if keep == "head" else ELLIPSIS + safe[len(safe) - cells + 1 :]


def wrap(text: str, cells: int, max_lines: int, *, ascii_only: bool = False) -> list[str]:
    """Safe text on at most so many lines, each exactly so many cells wide; breaks at line breaks and between words.

    The last line ends in an ellipsis where text is left over. A word longer than a line is broken in it.
    """
    if cells <= 0 or max_lines <= 0:
        return []
    scan = (cells * _SCAN_PER_CELL + _SCAN_EXTRA) * max_lines
    lines: list[str] = []
    cut = len(text) > scan
    for paragraph in text[:scan].replace("\r\n", "\n").split("\n"):
        if len(lines) > max_lines:
            break
        _wrap_paragraph(_units(paragraph, ascii_only), cells, max_lines + 1, lines)
    if len(lines) > max_lines or cut:
        lines = lines[:max_lines]
        lines[-1] = fit(lines[-1].rstrip() + " " * cells + ".", cells, ascii_only=ascii_only)
    return lines


def wrap_from(paragraph: str, cells: int, *, ascii_only: bool = False) -> tuple[list[str], str]:
    """All lines of text without a line break, wrapped as `wrap` does, and the text that the last one begins with.

    Wrapping that, with more text behind it, goes on where this ends: no line but the last can change any more.
    """
    if not paragraph.isascii():
        paragraph = unicodedata.normalize("NFC", paragraph)
    units = _units(paragraph, ascii_only)
    lines: list[str] = []
    start = _wrap_paragraph(units, cells, len(units) + 1, lines)
    return lines, paragraph[_character_of(paragraph, start, ascii_only) :]


def _character_of(text: str, unit: int, ascii_only: bool) -> int:
    """Where in a text, which is normalised, the piece with a number begins that it is drawn with."""
    if unit == 0 or (text.isascii() and not ascii_only):
        return unit
    # Units of more and more of it, until there are enough: halving what is left finds the place in few tries.
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(_units(text[: middle + 1], ascii_only)) > unit:
            high = middle
        else:
            low = middle + 1
    return low


def _wrap_paragraph(units: list[str], cells: int, max_lines: int, lines: list[str]) -> int:
    """Append the lines of one paragraph until there are `max_lines`; which unit the last one begins with."""
    begins = 0
    line: list[str] = []
    used = 0
    last_space = -1
    for number, unit in enumerate(units):
        size = _unit_width(unit)
        if size > cells:
            continue
        # Twice where what follows the last space fills the line again: a wide character behind a word of wide ones.
        while used + size > cells:
            if len(lines) >= max_lines:
                return begins
            if unit == " ":
                head, line = line, []
            elif last_space >= 0:
                head, line = line[:last_space], line[last_space + 1 :]
            else:
                head, line = line, []
            lines.append(_padded(head, cells))
            used = sum(map(_unit_width, line))
            last_space = -1
            begins = number - len(line)
            if unit == " ":
                begins = number + 1
                break
        else:
            if unit == " ":
                last_space = len(line)
            line.append(unit)
            used += size
    if len(lines) < max_lines:
        lines.append(_padded(line, cells))
    return begins


def _padded(units: list[str], cells: int) -> str:
    safe = "".join(units)
    return safe + " " * (cells - width(safe))


def _take(units: list[str], cells: int) -> tuple[list[str], int]:
    """The leading units that fit, and their width."""
    used = 0
    for count, unit in enumerate(units):
        size = _unit_width(unit)
        if used + size > cells:
            return units[:count], used
        used += size
    return units, used


def _ellipsis(ascii_only: bool) -> str:
    return ASCII_ELLIPSIS if ascii_only else ELLIPSIS


def _units(text: str, ascii_only: bool) -> list[str]:
    """The pieces that a text is drawn with, in order; no piece may be cut in two."""
    if text.isascii():
        if not ascii_only:
            return list(text.translate(_ASCII_TABLE))
    else:
        text = unicodedata.normalize("NFC", text)
    if ascii_only:
        return [unit for char in text if (unit := _ascii_unit(char))]
    units: list[str] = []
    marks = _MARKS_PER_LETTER  # a mark with no letter before it would land on what stands left of the text
    for char in text:
        if _is_mark(char):
            if marks < _MARKS_PER_LETTER:
                units[-1] += char
                marks += 1
            continue
        unit = _unit(char)
        if unit:
            units.append(unit)
            marks = 0 if unit == char and char.isalpha() else _MARKS_PER_LETTER
    return units


@lru_cache(maxsize=8192)
def _unit_width(unit: str) -> int:
    return width(unit)


@lru_cache(maxsize=4096)
def _is_mark(char: str) -> bool:
    """Whether it is an accent that stacks on the letter before it and takes no cell, everywhere."""
    return (
        unicodedata.category(char) == "Mn"
        and get_character_cell_size(char) == 0
        and not 0xFE00 <= ord(char) <= 0xFE0F
        and not 0xE0100 <= ord(char) <= 0xE01EF
        and char != "\u034f"
    )


@lru_cache(maxsize=8192)
def _unit(char: str) -> str:
    """What one character is drawn as: itself, a symbol for it, or nothing."""
    if char in _VISIBLE:
        return _VISIBLE[char]
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if 0x1F1E6 <= code <= 0x1F1FF:  # two regional indicators join into a flag: show the country's letters
        return chr(code - 0x1F1E6 + ord("A"))
    category = unicodedata.category(char)
    if category in ("Cc", "Cs", "Co", "Cn"):
        return _REPLACEMENT
    if category == "Cf":
        # Overrides of the reading order are an attack and are seen; joiners and the like are not missed.
        return _REPLACEMENT if _is_bidi(code) else ""
    if category == "Zs":
        return " "
    if category in ("Mn", "Me", "Mc") or 0x1F3FB <= code <= 0x1F3FF:
        return ""
    size = get_character_cell_size(char)
    if size == 0:
        return ""
    return char if size == (2 if unicodedata.east_asian_width(char) in "WF" else 1) else _REPLACEMENT


def _is_bidi(code: int) -> bool:
    return code in (0x061C, 0x200E, 0x200F) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


@lru_cache(maxsize=8192)
def _ascii_unit(char: str) -> str:
    """The same in printable ASCII: accents are folded, the rest becomes a question mark."""
    if " " <= char <= "~":
        return char
    if char in _VISIBLE_ASCII:
        return _VISIBLE_ASCII[char]
    if char < " ":
        return "^" + chr(ord(char) + 0x40)
    if char in _ASCII_FOLD:
        return _ASCII_FOLD[char]
    if _is_mark(char):
        return ""
    if not _unit(char):
        return ""
    folded = "".join(c for c in unicodedata.normalize("NFKD", char) if " " <= c <= "~")
    return folded if folded.strip() else "?"
