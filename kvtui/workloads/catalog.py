"""Finds a workload by name or file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvtui.workloads.file_format import parse_workload, read_text
from kvtui.workloads.traces import is_azure, is_mooncake, parse_azure, parse_mooncake
from kvtui.workloads.workload import Workload, WorkloadError

STREAM = "stream"
"""The workload that a dashboard opens with; it has no end, so it is none that can be loaded (see `stream`)."""

BUILTIN = {
    "chat": "conversations of several turns; each turn sends the history again, and finds it cached",
    "rag": "one long document and many questions about it: the document is computed once and shared",
    "burst": "more than fits, all at once: requests wait, and are preempted",
    "long": "one long prompt among short ones: it is computed in chunks while they are answered",
    "fork": "several continuations of each prompt: its blocks are shared, and copied where they are written to",
}
"""Names of the built-in workloads, and what each one shows."""


def load_workload(reference: str) -> Workload:
    """The built-in workload of this name, or the one in this file.

    Raises:
        WorkloadError: there is no such name or file, or the file is wrong; names the line and the field.
    """
    if reference in BUILTIN:
        file = resources.files("kvtui.workloads") / "builtin" / f"{reference}.toml"
        return parse_workload(file.read_text(encoding="utf-8"), f"{reference}.toml", toml=True, name=reference)
    path = Path(reference)
    if reference == STREAM and not path.exists():
        raise WorkloadError(
            f"{STREAM} has no end, and only `kvtui run` makes it: name one of {', '.join(BUILTIN)}, or a file"
        )
    if not path.exists():
        raise WorkloadError(
            f"no workload {reference!r}: it is neither a file nor one of {', '.join(BUILTIN)} (--workload NAME|FILE)"
        )
    if path.is_dir():
        raise WorkloadError(f"{path}: is a folder; a workload is a .json, .jsonl, .toml or .csv file")
    text, where = read_text(path), str(path)
    if is_azure(text) or path.suffix.lower() == ".csv":
        return parse_azure(text, where, path.stem)
    if is_mooncake(text):
        return parse_mooncake(text, where, path.stem)
    return parse_workload(text, where, toml=path.suffix.lower() == ".toml", name=path.stem)
