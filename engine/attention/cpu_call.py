"""What a caller of compiled workers keeps: the record of a call, counters that its threads share, scratch."""

from __future__ import annotations

import threading

import numpy as np

SERIAL_WORK = 1 << 15
"""Below about this many multiplications one thread is done before a second one would have started."""

COUNTER_BYTES = 64
"""From one counter to the next: each has a cache line of its own."""

_NUM_COUNTERS = 2


class Workspace(threading.local):
    """One thread's; each thread that asks gets another.

    Args:
        record_bytes: Of the record.

    Attributes:
        record: The record, to be packed into.
        counters: int64, all of them; to be set to zero before a call.
        address: Of the record.
        counters_address: Of the first counter.
    """

    def __init__(self, record_bytes: int) -> None:
        record = np.zeros(record_bytes, np.uint8)
        self.record, self.address = record.data, int(record.ctypes.data)
        words = COUNTER_BYTES // 8
        counters = np.zeros((_NUM_COUNTERS + 1) * words, np.int64)
        first = -(counters.ctypes.data // 8) % words
        self.counters = counters[first : first + _NUM_COUNTERS * words]
        self.counters_address = int(self.counters.ctypes.data)
        self._scratch = np.empty(0, np.float32)
        self._scratch_address = 0

    def scratch(self, num_floats: int) -> int:
        """Address of that much memory, on a cache line and valid until more is asked for."""
        needed = num_floats + 16
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.float32)
            self._scratch_address = -(-int(self._scratch.ctypes.data) // 64) * 64
        return self._scratch_address
