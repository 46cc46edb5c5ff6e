"""Folders of compiled workers: what is in use is kept, what nobody has used for long is removed, errors stop nobody."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import numba
import pytest

from engine.attention import cpu_cache, cpu_compile
from engine.attention.cpu_cache import KEPT_FOR, MOST, RECENT
from engine.attention.cpu_compile import Compiled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAY = 86400.0


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and nobody has looked for what is stale."""
    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    cpu_cache._remove_stale.cache_clear()


def kept(root: Path, number: int, age: float) -> Path:
    """A folder as Numba fills it, last used some seconds ago."""
    folder = root / f"{number:012x}"
    inner = folder / "model_0123"
    inner.mkdir(parents=True)
    for name in ("kernel.worker-1.py311.nbi", "kernel.worker-1.py311.1.nbc", "kernel.worker-1.py311.1.nbc.tmp.77"):
        (inner / name).write_bytes(b"code")
    used(folder, age)
    return folder


def used(folder: Path, age: float) -> None:
    os.utime(folder, (time.time() - age,) * 2)


def nothing() -> Callable[[int], None]:
    def worker(address):
        pass

    return worker


def test_what_no_version_has_used_for_thirty_days_goes_with_the_first_compilation(tmp_path: Path) -> None:
    root = tmp_path / "numba"
    old, recent = kept(root, 1, KEPT_FOR + DAY), kept(root, 2, KEPT_FOR - DAY)
    Compiled(nothing)
    assert not old.exists()
    assert len(list(recent.rglob("*.nb?"))) == 2


def test_using_a_worker_again_keeps_its_folder(tmp_path: Path) -> None:
    Compiled(nothing)
    (folder,) = (tmp_path / "numba").iterdir()
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}
    used(folder, 2 * KEPT_FOR)
    cpu_cache._remove_stale.cache_clear()
    Compiled(nothing)
    assert cpu_cache.stale(tmp_path / "numba", time.time() + KEPT_FOR - DAY) == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")} == written  # and it was found


def test_of_many_the_longest_unused_go_but_none_of_today(tmp_path: Path) -> None:
    folders = [kept(tmp_path, n, RECENT + (n + 1) * 60) for n in range(MOST)]
    today = [kept(tmp_path, MOST + n, RECENT / 2) for n in range(5)]
    cpu_cache.use(today[0])
    assert [folder for folder in folders if not folder.exists()] == folders[-5:]
    assert all(folder.exists() for folder in today)
    for folder in folders:
        if folder.exists():
            used(folder, 60)
    more = [kept(tmp_path, 2 * MOST + n, 60) for n in range(9)]
    cpu_cache._remove_stale.cache_clear()
    cpu_cache.use(today[0])
    assert all(folder.exists() for folder in (*folders[:-5], *today, *more))


def test_only_what_numba_wrote_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "numba", kept(tmp_path / "elsewhere", 1, 2 * KEPT_FOR)
    root.mkdir()
    (root / f"{2:012x}").symlink_to(elsewhere)
    (root / f"{3:012x}").write_text("no folder")
    theirs = kept(root, 4, 2 * KEPT_FOR)
    (theirs / "model_0123" / "notes.txt").write_text("mine")
    (theirs / "linked").symlink_to(elsewhere)
    used(theirs, 2 * KEPT_FOR)
    named = root / "a-folder-of-mine"
    named.mkdir()
    used(named, 2 * KEPT_FOR)
    cpu_cache.use(root / f"{9:012x}")
    assert len(list(elsewhere.rglob("*.nb?"))) == 2
    assert [path.name for path in theirs.rglob("*.*")] == ["notes.txt"]
    assert named.exists()
    assert (root / f"{3:012x}").exists()


@pytest.mark.parametrize("call", ["mkdir", "utime", "scandir", "unlink", "rmdir"])
def test_no_error_of_the_file_system_stops_a_compilation(call: str, monkeypatch, tmp_path: Path) -> None:
    old = kept(tmp_path / "numba", 1, 2 * KEPT_FOR)

    def fails(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        cpu_cache.use(tmp_path / "numba" / f"{2:012x}")
    assert old.exists() == (call in {"scandir", "unlink", "rmdir"})
    assert Compiled(nothing).address


def test_a_cache_that_is_a_file_costs_only_time(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path / "file"))
    assert Compiled(nothing).address


def test_many_may_remove_at_once(tmp_path: Path) -> None:
    folders = [kept(tmp_path, n, 2 * KEPT_FOR) for n in range(40)]
    start, errors = threading.Barrier(4), []

    def remove() -> None:
        start.wait()
        try:
            cpu_cache._remove_stale.__wrapped__(tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not any(folder.exists() for folder in folders)


def test_a_folder_that_the_user_names_to_numba_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "theirs"))
    old = kept(tmp_path / "numba", 1, 2 * KEPT_FOR)
    theirs = kept(tmp_path / "theirs", 1, 2 * KEPT_FOR)
    Compiled(nothing)
    assert old.exists()
    assert theirs.exists()


def test_a_home_folder_may_be_abbreviated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTUI_CACHE", "~/caches")
    assert cpu_compile.cache_dir([]).parent == tmp_path / "caches" / "numba"
