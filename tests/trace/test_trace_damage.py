"""Which steps of a damaged recording are lost, and where it goes on."""

import pytest
from damaged_recording import SEGMENT, damaged_recording

from engine.trace.audit import audit
from engine.trace.damage import Damage, readable_after, unreadable
from engine.trace.file_format import RecordingError
from engine.trace.reader import Recording


def damage_at(recording, step):
    with pytest.raises(RecordingError) as caught:
        recording.state_at(step)
    return recording.damage(caught.value)


def test_the_steps_of_a_damaged_segment_are_lost_and_the_next_keyframe_leads_on(tmp_path):
    num_steps = damaged_recording(tmp_path / "a.mcap", 1)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert unreadable(recording) == [(9, 18)]
        assert damage_at(recording, 12) == Damage(9, 17, 18, num_steps - 9)
        assert recording.state_at(18).step == 18


def test_neighbours_are_one_damage_and_without_a_later_keyframe_nothing_can_be_shown(tmp_path):
    num_steps = damaged_recording(tmp_path / "a.mcap", 2, 3, keyframes=10_000)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert damage_at(recording, num_steps - 1) == Damage(18, 35, -1, num_steps - 18)
        assert readable_after(recording, 35) == -1
        assert len(list(recording.steps(36))) == num_steps - 36, "steps can be read whose state cannot be worked out"


def test_the_audit_counts_and_checks_what_is_left_on_both_sides_of_the_damage(tmp_path):
    num_steps = damaged_recording(tmp_path / "whole.mcap")
    damaged_recording(tmp_path / "a.mcap", 0, 3)
    with Recording.open(tmp_path / "whole.mcap") as recording:
        whole = audit(recording)
    with Recording.open(tmp_path / "a.mcap") as recording:
        found = audit(recording)
        steps = [step for start, stop in ((9, 27), (36, num_steps)) for step in recording.steps(start, stop)]
    assert found.lost == [(0, 8), (27, 35)]
    assert "steps 0 to 8 cannot be read" in found.damage
    assert (found.num_steps, found.checked) == (len(steps), len(steps))
    assert found.generated_tokens == sum(len(step.tokens) for step in steps)
    assert found.num_violations == 0
    assert (whole.lost, whole.damage, whole.checked) == ([], "", num_steps)
    assert found.peak_used == whole.peak_used


def test_steps_whose_state_is_not_known_are_counted_and_not_checked(tmp_path):
    num_steps = damaged_recording(tmp_path / "a.mcap", 1, keyframes=10_000)
    with Recording.open(tmp_path / "a.mcap") as recording:
        found = audit(recording)
    assert (found.num_steps, found.checked, found.num_violations) == (num_steps - SEGMENT, SEGMENT, 0)


def test_a_damaged_vocabulary_is_read_from_the_segments_instead(tmp_path, monkeypatch):
    from engine.trace import recording as recording_module

    monkeypatch.setattr(recording_module, "VOCABULARY_SEGMENTS", 2)
    num_steps = damaged_recording(tmp_path / "a.mcap")
    with Recording.open(tmp_path / "a.mcap") as recording:
        steps = list(recording.steps())
        vocabulary = recording.parts._vocabulary_at
    content = bytearray((tmp_path / "a.mcap").read_bytes())
    content[vocabulary.offset + vocabulary.length // 2] ^= 1
    (tmp_path / "a.mcap").write_bytes(content)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert recording.complete
        assert list(recording.steps()) == steps
        assert recording.num_steps == num_steps
