"""Columns of integers as bytes: narrow, in byte planes, and as differences from what was to be expected.

A recording keeps the numbers of many steps side by side, because a column of one kind of number compresses far better
than rows of all kinds. Everything here is exact: integers wrap at 64 bits on the way in and back on the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

Column = npt.NDArray[np.int64]

_WIDTHS = (1, 2, 4, 8)


def column(values: Iterable[int], count: int = -1) -> Column:
    """A column of integers.

    Raises:
        OverflowError: one of them does not fit 64 bits.
    """
    return np.fromiter(values, np.int64, count)


def pack(values: Column) -> bytes:
    """A column as bytes: the width of one number (0 where all are 0), then all lowest bytes, all second bytes, ...

    Signed, little-endian, the narrowest of 1, 2, 4 and 8 bytes that holds them all.
    """
    if len(values) == 0 or not values.any():
        return b"\0"
    low, high = int(values.min()), int(values.max())
    width = next(w for w in _WIDTHS if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    narrow = values.astype(f"<i{width}")
    if width == 1:
        return b"\1" + narrow.tobytes()
    return bytes((width,)) + narrow.view(np.uint8).reshape(-1, width).T.tobytes()


def unpack(data: bytes, count: int) -> Column:
    """The column of `count` numbers that `pack` made these bytes of.

    Raises:
        ValueError: they are not a column of that length.
    """
    width = data[0] if data else -1
    if width == 0 and len(data) == 1:
        return np.zeros(count, np.int64)
    if width not in _WIDTHS or len(data) != 1 + width * count:
        raise ValueError(f"a column of {count} numbers has {len(data)} bytes of width {width}")
    planes = np.frombuffer(data, np.uint8, offset=1)
    if width == 1:
        return planes.view(np.int8).astype(np.int64)
    narrow = np.empty((count, width), np.uint8)
    for at, plane in enumerate(planes.reshape(width, count)):  # Plane by plane: numpy transposes byte by byte.
        narrow[:, at] = plane
    return narrow.view(f"<i{width}").reshape(count).astype(np.int64)


def differences(values: Column) -> Column:
    """Each number less the one before it; the first less 0."""
    return np.diff(values, prepend=0)


def sums(residuals: Column) -> Column:
    """Undoes `differences`."""
    return np.cumsum(residuals)


def surprise(group: Column, values: Column, advance: Column) -> Column:
    """How far each value is from what its group led to expect: the value before it in the group plus its advance.

    The first of a group is compared with 0. A decoding request, for example, has computed one token more each time,
    so that its column is all zeros.
    """
    order, first = _grouped(group)
    ordered = values[order]
    expected = np.zeros_like(ordered)
    expected[1:] = ordered[:-1] + advance[order][:-1]
    expected[first] = 0
    result = np.empty_like(values)
    result[order] = ordered - expected
    return result


def undo_surprise(group: Column, residuals: Column, advance: Column) -> Column:
    """Undoes `surprise`, given the same groups and advances."""
    if len(residuals) == 0:
        return residuals.copy()
    order, first = _grouped(group)
    increments = residuals[order]
    increments[1:] += np.where(first[1:], 0, advance[order][:-1])
    total = np.cumsum(increments)
    starts = np.flatnonzero(first)
    before = np.concatenate(([0], total[starts[1:] - 1]))
    result = np.empty_like(residuals)
    result[order] = total - np.repeat(before, np.diff(np.append(starts, len(total))))
    return result


def _grouped(group: Column) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    first = np.ones(len(group), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return order, first
