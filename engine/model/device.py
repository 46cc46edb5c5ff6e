"""Where a model runs and in which precision, by what the machine can do."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from engine.config import ConfigError, DType, KVDType

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is the first CUDA device, or the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"the device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"the device {name!r} is not here: this torch sees no CUDA device; use --device cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"the device {name!r} is not here: there are {count}, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def choose_dtype(name: DType, device: torch.device) -> torch.dtype:
    """The element type; `auto` is bfloat16 where the device computes it natively, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        with torch.cuda.device(device):  # torch answers for the current one, which may be another card
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = _cpu_has_bfloat16()
    return torch.bfloat16 if native else torch.float32


def choose_kv_dtype(name: KVDType, dtype: torch.dtype) -> torch.dtype:
    """The element type of the cache of a model in `dtype`; `auto` is the model's own."""
    return dtype if name == "auto" else _KV_DTYPES[name]


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; without, torch converts back and forth and is slower than float32."""
    if platform.machine().lower() in {"x86_64", "amd64"}:
        probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(probe is not None and probe() for probe in probes)
    try:
        features = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return " bf16" in features


def set_threads() -> int:
    """Let torch use as many threads as this process has physical cores; `OMP_NUM_THREADS`, where set, decides.

    More threads than cores (the logical ones, or a container's view of the whole machine) make matrix products slower.

    Returns:
        How many it uses.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(physical_cores())
    return torch.get_num_threads()


def physical_cores() -> int:
    """Physical cores that this process may use, a container's quota counted."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:
        usable = set(range(os.cpu_count() or 1))
    cores = len({_core_of(cpu) for cpu in usable})
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota + 0.5)))


def _core_of(cpu: int) -> tuple[str, ...]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (
            (topology / "physical_package_id").read_text(encoding="ascii").strip(),
            (topology / "core_id").read_text(encoding="ascii").strip(),
        )
    except OSError:
        return (f"cpu{cpu}",)


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
