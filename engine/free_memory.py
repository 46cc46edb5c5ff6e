"""How much memory is free, on a device and on the machine."""

from __future__ import annotations

import os

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated now on a device; None where the platform does not say.

    On Linux this is `MemAvailable`, lowered to what the control group still allows: in a container the machine's own
    figure is too large.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type != "cpu":
        return None
    candidates = [n for n in (_mem_available(), _cgroup_available()) if n is not None]
    if candidates:
        return min(candidates)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _mem_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - a proc file, one line wanted
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_available() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:  # noqa: PTH123
            limit = file.read().strip()
        if limit == "max":
            return None
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:  # noqa: PTH123
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:  # noqa: PTH123
            # The page cache counts as used there and is given back on demand.
            cached = next((int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0)
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None
