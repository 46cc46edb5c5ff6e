"""What was compiled is compiled anew when any file changes that went into it: its folder is named after all of them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.attention import cpu_compile, cpu_plan
from engine.model import byte_products, compiled_operations, cpu_bfloat16, cpu_linear, int8_products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKERS = {
    "attention": (cpu_plan._compiled, torch.bfloat16, torch.int8),
    "rows of a layer": (compiled_operations._compiled, torch.float32),
    "linear layers": (cpu_linear._worker, 8),
    "linear layers of bfloat16": (cpu_bfloat16._worker, 16),
    "products of bytes": (byte_products._worker, 8, torch.float32),
    "products of 16 bits": (int8_products._worker,),
}


KEEPING = {"cpu_cache.py", "cache_folder.py"}
"""Reached by way of `cpu_compile.py`: where what was compiled is kept, which none of it depends on."""


def imported_by(path: Path) -> Iterator[str]:
    """The names of the engine's modules that a file imports; some are names in a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine."):
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names)


def reached_from(path: Path) -> set[Path]:
    """A file and those of the engine's that it imports, at any remove."""
    found, left = set(), [path]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            specs = [importlib.util.find_spec(name) for name in imported_by(path) if not is_in_a_module(name)]
            left += [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return {path for path in found if path.name != "__init__.py"}


def is_in_a_module(name: str) -> bool:
    """Whether a dotted name is something in a file, and not a file."""
    parent = importlib.util.find_spec(name.rpartition(".")[0])
    return parent is not None and parent.submodule_search_locations is None


@pytest.mark.parametrize("name", WORKERS)
def test_the_folder_of_a_worker_is_named_after_every_file_that_is_compiled_into_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Path] = []
    compiled: list[Callable[[int], None]] = []

    def compile_nothing(worker: Callable[[int], None], folder: Path | None) -> Any:
        compiled.append(worker)
        return SimpleNamespace(address=0)

    monkeypatch.setattr(cpu_compile, "cache_dir", lambda sources: named.extend(sources) or Path("nowhere"))
    monkeypatch.setattr(cpu_compile, "_compile", compile_nothing)
    make, *form = WORKERS[name]
    make.__wrapped__(*form)
    # Numba looks at the file of the worker itself.
    own = Path(str(inspect.getsourcefile(compiled[0])))
    assert {path.name for path in reached_from(own) - {own} - set(named)} - KEEPING == set()
