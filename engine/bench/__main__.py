"""`python -m engine.bench NAME ...`: the same as `python -m engine.bench.NAME ...`."""

from __future__ import annotations

import runpy
import sys

NAMES = ("agreement", "ahead_of_time", "attention", "engine", "gpu", "pool", "steps", "trace")

if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
    print(f"usage: python -m engine.bench NAME [OPTIONS]\n\nNAME is one of {', '.join(NAMES)}.", file=sys.stderr)
    sys.exit(0 if sys.argv[1:2] in (["--help"], ["-h"]) else 2)
name = sys.argv.pop(1)
runpy.run_module(f"engine.bench.{name}", run_name="__main__", alter_sys=True)
