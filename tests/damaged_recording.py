"""A recording of a few segments, some of them damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace import recording as recording_module
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter

if TYPE_CHECKING:
    from pathlib import Path

    from engine.trace.events import TraceMessage

SEGMENT = 9
"""Steps of a segment."""


def damaged_recording(path: Path, *segments: int, keyframes: int = SEGMENT) -> int:
    """Write one whose segments of these numbers cannot be read; how many steps it has.

    Args:
        path: The file.
        segments: Numbers of segments, the first is 0.
        keyframes: Steps between two keyframes.
    """
    config = EngineConfig(
        cache=CacheConfig(num_blocks=24, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_module, "SEGMENT_STEPS", SEGMENT)
        patch.setattr(recording_module, "KEYFRAME_STEPS", keyframes)
        patch.setattr(recording_module, "KEYFRAME_STEPS_MAX", keyframes)
        patch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
        engine = simulated_engine(config)
        messages: list[TraceMessage] = []
        engine.add_sink(messages.append)
        for number in range(8):
            engine.add_request(f"the block of the cache {number}", SamplingParams(max_tokens=24, ignore_eos=True))
        while engine.has_work:
            engine.step()
        with RecordingWriter(path, engine.header) as writer:
            for message in messages:
                writer(message)
    with Recording.open(path) as recording:
        places = [recording.parts.segments[at, 2:4].tolist() for at in segments]
        num_steps = recording.num_steps
    content = bytearray(path.read_bytes())
    for offset, length in places:
        content[offset + length // 2] ^= 1
    path.write_bytes(content)
    return num_steps
