"""Where the data that ships with kvtui lies: in a wheel beside the code, in a checkout at its top."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def packaged_folder(name: str) -> Path:
    """The folder of packaged data with this name (`themes`, `recordings`); it may not exist.

    A wheel carries it inside the package (`kvtui/_data`); a checkout, which an editable install points into, keeps it
    at the top.
    """
    in_wheel = _HERE / "_data" / name
    return in_wheel if in_wheel.is_dir() else _HERE.parent / name
