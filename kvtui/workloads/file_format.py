"""Reads workload files of kvtui's own form: JSON, JSON lines or TOML. `docs/workloads.md` describes it.

A file holds requests, each a prompt, token ids, messages, or the turns of a conversation:

    {"defaults": {"max_tokens": 64}, "requests": [
        {"prompt": "The tide turns", "max_tokens": 32},
        {"at": 0.5, "system": "You answer briefly.", "turns": ["What is a tide?", "And a neap tide?"]},
        {"ids": [12, 99, 407], "out": 20}]}

A JSON list of requests, and one request a line (JSON lines), are accepted as well.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from engine.request import RequestError, SamplingParams
from kvtui.workloads.pieces import (
    Piece,
    is_json_lines,
    json_list_pieces,
    json_object_pieces,
    line_matching,
    toml_pieces,
)
from kvtui.workloads.workload import Message, Session, Workload, WorkloadError

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES = 64 * 2**20
MAX_SESSIONS = 100_000

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Text = str | list[str]
"""Text; a list is its paragraphs."""


class MessageRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A message as files write it."""

    role: str
    content: str


class SettingsRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What both a request and a file's `defaults` may say."""

    system: _Text | None = None
    pause: _Seconds | None = None
    max_tokens: int | None = None
    out: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    n: int | None = None


class RequestRecord(SettingsRecord, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request as files write it."""

    at: _Seconds | None = None
    name: str | None = None
    prompt: _Text | None = None
    ids: list[_TokenId] | None = None
    messages: list[MessageRecord] | None = None
    turns: list[str] | None = None


_DEFAULT_MAX_TOKENS = 128
_ROLES = ("system", "user", "assistant")
_SOURCES = ("prompt", "ids", "messages", "turns")
_TOP_LEVEL = ("name", "title", "defaults", "requests")


def read_text(path: Path) -> str:
    """A file's text, with a bound on its size and one clear line where it cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WorkloadError(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB, the most a workload file may be")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error


def parse_workload(text: str, where: str, *, toml: bool, name: str) -> Workload:
    """A workload from a file's text; `where` is what errors call the file."""
    title, defaults = "", SettingsRecord()
    if toml:
        top, pieces = toml_pieces(text, where)
    elif text.lstrip().startswith("{") and not is_json_lines(text):
        top, pieces = json_object_pieces(text, where)
    else:
        top, pieces = {}, list(json_list_pieces(text, where))
    for key in top:
        if key not in _TOP_LEVEL:
            line = Piece(text, 1).line_of(key)
            raise WorkloadError(f"{where}: line {line}: unknown field `{key}`{_suggestion(key, _TOP_LEVEL)}")
    for key in ("name", "title"):
        if not isinstance(top.get(key, ""), str):
            raise WorkloadError(f"{where}: line {Piece(text, 1).line_of(key)}: field `{key}`: a text is expected")
    name, title = top.get("name", name), top.get("title", title)
    if "defaults" in top:
        line = Piece(text, 1).line_of("defaults") if not toml else line_matching(text, r"^\s*\[defaults\]")
        lines = text.splitlines(keepends=True)
        piece = Piece("".join(lines[line - 1 :]), line, top["defaults"])
        defaults = _decode(piece, where, SettingsRecord)
    if not pieces:
        raise WorkloadError(f"{where}: holds no requests")
    if len(pieces) > MAX_SESSIONS:
        raise WorkloadError(f"{where}: holds {len(pieces):,} requests; the most is {MAX_SESSIONS:,}")
    sessions = [
        _session(_decode(piece, where, RequestRecord), defaults, piece, where, f"{name}-{index + 1}")
        for index, piece in enumerate(pieces)
    ]
    sessions.sort(key=lambda session: session.at)
    return Workload(name=name, title=title, sessions=tuple(sessions))


def _session(record: RequestRecord, defaults: SettingsRecord, piece: Piece, where: str, name: str) -> Session:
    def wrong(field_name: str, message: str) -> WorkloadError:
        return WorkloadError(f"{where}: line {piece.line_of(field_name)}: field `{field_name}`: {message}")

    given = [source for source in _SOURCES if getattr(record, source) is not None]
    if len(given) != 1:
        found = f"{' and '.join(f'`{g}`' for g in given)} are given" if given else "none is given"
        raise WorkloadError(
            f"{where}: line {piece.line}: a request needs one of `prompt`, `ids`, `messages` or `turns`; {found}"
        )
    source = given[0]
    if not getattr(record, source):
        raise wrong(source, "is empty")
    values = {
        key: getattr(defaults, key) if getattr(record, key) is None else getattr(record, key)
        for key in SettingsRecord.__struct_fields__
    }
    # A request that gives one of the two overrides whichever the defaults give.
    if record.out is not None and record.max_tokens is None:
        values["max_tokens"] = None
    elif record.max_tokens is not None and record.out is None:
        values["out"] = None
    system = _joined(values["system"])
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    if source == "prompt":
        prompt = _joined(record.prompt)
        if record.system is not None:
            raise wrong("system", "a `prompt` is continued as it stands; use `turns` for a conversation")
    elif source == "ids":
        prompt = tuple(record.ids or ())
    else:
        for message in record.messages or ():
            if message.role not in _ROLES:
                raise wrong("role", f"`{message.role}` is not one of {', '.join(_ROLES)}")
        written = [Message(m.role, m.content) for m in record.messages or ()]
        turns = record.turns or []
        if system is not None and not any(m.role == "system" for m in written):
            written.insert(0, Message("system", system))
        messages = (*written, *(Message("user", turn) for turn in turns[:1]))
        follow_ups = tuple(turns[1:])
    return Session(
        name=(record.name or name)[:64],
        at=record.at or 0.0,
        params=_params(values, wrong),
        prompt=prompt,
        messages=messages,
        follow_ups=follow_ups,
        pause=values["pause"] or 0.0,
    )


def _params(values: dict[str, Any], wrong: Any) -> SamplingParams:
    max_tokens, ignore_eos = values["max_tokens"], values["ignore_eos"]
    if values["out"] is not None:
        if max_tokens is not None:
            raise wrong("out", "stands for `max_tokens` and `ignore_eos` together; give one of the two")
        max_tokens, ignore_eos = values["out"], True if ignore_eos is None else ignore_eos
    stop = values["stop"]
    fields = {
        "max_tokens": _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        "ignore_eos": bool(ignore_eos),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
        "cache_salt": values["cache_salt"],
        "seed": values["seed"],
    }
    fields |= {key: values[key] for key in ("temperature", "top_p", "top_k", "min_p", "n") if values[key] is not None}
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        name = next((key for key in (*fields, "stop") if str(error).startswith(key)), "stop")
        if name == "max_tokens" and values["out"] is not None:
            name = "out"
        raise wrong(name, str(error)) from error


def _joined(text: _Text | None) -> str | None:
    return "\n\n".join(text) if isinstance(text, list) else text


def _decode(piece: Piece, where: str, kind: Any) -> Any:
    try:
        if piece.value is not None:
            return msgspec.convert(piece.value, kind)
        return msgspec.json.decode(piece.text, type=kind)
    except msgspec.ValidationError as error:
        raise WorkloadError(_explained(str(error), piece, where, kind)) from error
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{where}: line {piece.line}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise WorkloadError(f"{where}: line {piece.line}: nested too deeply") from error


def _explained(message: str, piece: Piece, where: str, kind: Any) -> str:
    """A validation error of msgspec as `FILE: line N: field `NAME`: what is wrong`."""
    what, _, path = message.partition(" - at ")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        name = unknown[1]
        return f"{where}: line {piece.line_of(name)}: unknown field `{name}`{_suggestion(name, kind.__struct_fields__)}"
    keys = re.findall(r"\$?\.(\w+)|\[(?:\.\.\.|\d+)\]", path.strip("`"))
    name = next((key for key in reversed(keys) if key), "")
    if not name:
        return f"{where}: line {piece.line}: {what}"
    what = what.replace("`", "")
    return f"{where}: line {piece.line_of(name)}: field `{name}`: {what[0].lower()}{what[1:]}"


def _suggestion(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean `{close[0]}`?)" if close else f"; known are {', '.join(known)}"
