"""Reads production traces that give lengths and times but no text.

Azure's LLM inference traces (Azure Public Dataset) are CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. Mooncake's
(Qin et al., FAST 2025) are JSON lines: `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, one id for
each 512 prompt tokens, equal where two prompts share that part of their prefix.
"""

from __future__ import annotations

import csv
import re
from datetime import datetime
from typing import Annotated

import msgspec

from engine.request import SamplingParams
from kvtui.workloads.file_format import MAX_SESSIONS
from kvtui.workloads.workload import Session, SyntheticPrompt, Workload, WorkloadError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_PROMPT_TOKENS = 10_000_000

_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]


class MooncakeRecord(msgspec.Struct):
    """One line of a Mooncake trace; fields beyond these are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[int] = []


def is_azure(text: str) -> bool:
    """Whether a file starts like an Azure trace."""
    return text.lstrip().split("\n", 1)[0].strip().startswith(AZURE_COLUMNS[0] + ",")


def is_mooncake(text: str) -> bool:
    """Whether a file starts like a Mooncake trace."""
    return '"input_length"' in text.lstrip().split("\n", 1)[0]


def parse_azure(text: str, where: str, name: str) -> Workload:
    """The workload of an Azure trace, its first request at 0 s.

    Raises:
        WorkloadError: names the line and the column.
    """
    rows = csv.reader(text.splitlines())
    header = tuple(column.strip() for column in next(rows, []))
    missing = [column for column in AZURE_COLUMNS if column not in header]
    if missing:
        raise WorkloadError(f"{where}: line 1: no column `{missing[0]}`; an Azure trace has {', '.join(AZURE_COLUMNS)}")
    places = [header.index(column) for column in AZURE_COLUMNS]
    sessions: list[Session] = []
    start: datetime | None = None
    try:
        for row in rows:
            if not row:
                continue
            line = rows.line_num
            if len(row) < len(header):
                raise WorkloadError(f"{where}: line {line}: {len(row)} columns where {len(header)} are expected")
            when = _moment(row[places[0]], where, line)
            start = start or when
            lengths = [_count(row[place], where, line, header[place]) for place in places[1:]]
            at = max(0.0, (when - start).total_seconds())
            sessions.append(_traced(f"{name}-{len(sessions) + 1}", at, lengths[0], lengths[1], (), len(sessions)))
    except csv.Error as error:
        raise WorkloadError(f"{where}: line {rows.line_num}: not valid CSV: {error}") from error
    return _workload(sessions, where, name, "an Azure inference trace: lengths and times, arbitrary tokens")


def parse_mooncake(text: str, where: str, name: str) -> Workload:
    """The workload of a Mooncake trace.

    Raises:
        WorkloadError: names the line and the field.
    """
    decoder = msgspec.json.Decoder(MooncakeRecord)
    sessions: list[Session] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at ")
            field = re.search(r"\.(\w+)", path) or re.search(r"field `(\w+)`", what)
            named = f"field `{field[1]}`: " if field else ""
            raise WorkloadError(f"{where}: line {number}: {named}{what.replace('`', '')}") from error
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{where}: line {number}: not valid JSON: {error}") from error
        sessions.append(
            _traced(
                f"{name}-{len(sessions) + 1}",
                record.timestamp / 1e3,
                record.input_length,
                record.output_length,
                tuple(record.hash_ids),
                len(sessions),
            )
        )
    return _workload(sessions, where, name, "a Mooncake trace: lengths, times and shared prefixes, arbitrary tokens")


def _traced(name: str, at: float, prompt: int, output: int, block_ids: tuple[int, ...], salt: int) -> Session:
    return Session(
        name=name,
        at=at,
        prompt=SyntheticPrompt(max(1, prompt), block_ids, salt=salt),
        params=SamplingParams(max_tokens=max(1, output), ignore_eos=True),
    )


def _workload(sessions: list[Session], where: str, name: str, title: str) -> Workload:
    if not sessions:
        raise WorkloadError(f"{where}: holds no requests")
    if len(sessions) > MAX_SESSIONS:
        raise WorkloadError(f"{where}: holds {len(sessions):,} requests; the most is {MAX_SESSIONS:,}")
    return Workload(name=name, title=title, sessions=tuple(sorted(sessions, key=lambda session: session.at)))


def _moment(text: str, where: str, line: int) -> datetime:
    # Azure writes seven digits after the point; Python takes six.
    written = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
    try:
        moment = datetime.fromisoformat(written)
    except ValueError as error:
        raise WorkloadError(f"{where}: line {line}: field `TIMESTAMP`: {text.strip()[:40]!r} is not a time") from error
    return moment.replace(tzinfo=None)


def _count(text: str, where: str, line: int, column: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = -1
    if not 0 <= count <= MAX_PROMPT_TOKENS:
        raise WorkloadError(f"{where}: line {line}: field `{column}`: {text.strip()[:40]!r} is not a number of tokens")
    return count
