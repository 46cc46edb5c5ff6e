"""Cuts a workload file into its requests and remembers the line of each, so that an error can name it."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtui.workloads.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that holds one record.

    Attributes:
        text: As it is written.
        line: Where it starts.
        value: What it says, where that is known already; else `text` is JSON still to be decoded.
    """

    text: str
    line: int
    value: Any = None

    def line_of(self, name: str) -> int:
        """The line that a field is on, or the record's first where it cannot be told."""
        found = re.search(rf"""["']?\b{re.escape(name)}["']?\s*[:=]""", self.text)
        return self.line + (self.text.count("\n", 0, found.start()) if found else 0)


def is_json_lines(text: str) -> bool:
    """Whether the first line is a whole JSON object by itself and not a whole workload."""
    first = text.lstrip().split("\n", 1)[0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "requests" not in value


def json_list_pieces(text: str, where: str) -> Iterator[Piece]:
    """The requests of a JSON list, or of JSON lines, each with the line it starts on."""
    if text.lstrip().startswith("["):
        yield from _elements(text, text.index("["), where)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Piece(line, number)


def json_object_pieces(text: str, where: str) -> tuple[dict[str, Any], list[Piece]]:
    """The top level of a JSON object, and its requests."""
    try:
        top = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: line {error.lineno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise WorkloadError(f"{where}: nested too deeply") from error
    if not isinstance(top.get("requests"), list):
        raise WorkloadError(f"{where}: line 1: field `requests`: a list of requests is expected")
    found = re.search(r'"requests"\s*:\s*\[', text)
    if found is None:
        raise WorkloadError(f"{where}: line 1: field `requests`: a list of requests is expected")
    return top, list(_elements(text, found.end() - 1, where))


def _elements(text: str, opening: int, where: str) -> Iterator[Piece]:
    """The elements of the JSON array whose `[` is at `opening`."""
    decoder, position = json.JSONDecoder(), opening + 1
    line, counted = 1, 0
    while True:
        position = _skip(text, position, " \t\r\n")
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]":
            return
        try:
            _, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{where}: line {error.lineno}: not valid JSON: {error.msg}") from error
        except RecursionError as error:
            raise WorkloadError(f"{where}: line {line}: nested too deeply") from error
        yield Piece(text[position:end], line)
        position = _skip(text, end, " \t\r\n")
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            broken = text.count("\n", 0, position) + 1
            raise WorkloadError(f"{where}: line {broken}: not valid JSON: a comma or the end of the list is expected")


def _skip(text: str, position: int, blank: str) -> int:
    while position < len(text) and text[position] in blank:
        position += 1
    return position


def toml_pieces(text: str, where: str) -> tuple[dict[str, Any], list[Piece]]:
    """The top level of a TOML file, and its requests."""
    try:
        top = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        number = line[1] if line else text.count("\n") + 1
        raise WorkloadError(f"{where}: line {number}: not valid TOML: {str(error).split(' (at')[0]}") from error
    requests = top.get("requests", [])
    if not isinstance(requests, list) or not all(isinstance(r, dict) for r in requests):
        raise WorkloadError(f"{where}: field `requests`: tables [[requests]] are expected")
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines, 1) if line.strip().startswith("[[requests]]")]
    pieces = []
    for index, value in enumerate(requests):
        start = starts[index] if len(starts) == len(requests) else 1
        stop = starts[index + 1] - 1 if len(starts) == len(requests) and index + 1 < len(starts) else len(lines)
        pieces.append(Piece("".join(lines[start - 1 : stop]), start, value))
    return top, pieces


def line_matching(text: str, pattern: str) -> int:
    """The first line that a pattern matches on; 1 where there is none."""
    found = re.search(pattern, text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1
