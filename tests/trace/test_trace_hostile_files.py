"""Damaged and made-up files: a readable prefix or a RecordingError, in bounded memory and time."""

import io
import struct
import tracemalloc
import zlib

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.writer import IndexType, Writer
from trace_builder import TraceBuilder, make_header, simulated_trace

from engine.trace import container
from engine.trace import recording as recording_module
from engine.trace.audit import audit
from engine.trace.events import StepTrace
from engine.trace.file_format import DAMAGE, Index, RecordingError
from engine.trace.keyframe import Keyframe
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Bytes of a recording with several segments and keyframes, and its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_module, "SEGMENT_STEPS", 9)
        patch.setattr(recording_module, "KEYFRAME_STEPS", 9)
        patch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
        patch.setattr(recording_module, "VOCABULARY_SEGMENTS", 3)
        header, messages = simulated_trace(seed=6, num_requests=5)
        path = tmp_path_factory.mktemp("hostile") / "a.mcap"
        with RecordingWriter(path, header) as writer:
            for message in messages:
                writer(message)
    return path.read_bytes(), [message for message in messages if isinstance(message, StepTrace)]


def one_line(error):
    return "\n" not in str(error)


def read_all(path):
    """Ask everything that can be asked of a recording; only a RecordingError may come out."""
    try:
        recording = Recording.open(path)
    except RecordingError as error:
        return one_line(error)
    with recording:
        for question in (
            lambda: list(recording.messages()),
            lambda: list(recording.requests()),
            lambda: recording.state_at(recording.num_steps - 1),
            lambda: recording.state_at((recording.num_steps - 1) // 2),
            lambda: list(recording.steps(recording.num_steps // 2)),
        ):
            try:
                question()
            except RecordingError as error:
                if not one_line(error):
                    return False
    return True


@given(data=st.data())
@FUZZ
def test_flipped_bytes_give_an_error_or_the_steps_as_they_were(original, tmp_path, data):
    content, steps = original
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        changed[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.mcap"
    path.write_bytes(changed)
    assert read_all(path)
    try:
        with Recording.open(path) as recording:
            for step in recording.steps():
                assert step == steps[step.index]
    except RecordingError:
        pass


@given(data=st.data())
@FUZZ
def test_parts_cut_out_doubled_or_overwritten_are_survived(original, tmp_path, data):
    content, _ = original
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, min(len(content), start + 2000)))
    middle = data.draw(st.sampled_from([b"", content[start:stop] * 2, b"\0" * (stop - start), b"\xff" * 40]))
    path = tmp_path / "spliced.mcap"
    path.write_bytes(content[:start] + middle + content[stop:])
    assert read_all(path)


# -- made up: valid MCAP, hostile content ---------------------------------------------------------------------------


def make_file(path, payloads, attachments=()):
    """An MCAP file of (topic, message) pairs, each a chunk with a right checksum."""
    stream = io.BytesIO()
    writer = Writer(stream, chunk_size=1, index_types=IndexType.ALL)
    writer.start(profile="kvtui")
    channels = {topic: writer.register_channel(topic, "msgpack", 0) for topic in ("header", "segment", "keyframe")}
    offsets = []
    for topic, payload in payloads:
        start = stream.tell()
        data = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        writer.add_message(channels[topic], 0, data, 0)
        offsets.append((start + 9, stream.tell() - start - 9))
    for name, value in attachments:
        writer.add_attachment(0, 0, name, "", value)
    if attachments:
        writer.finish()
    path.write_bytes(stream.getvalue())
    return offsets


def parts_of(content, tmp_path):
    """The segments and keyframes of a recording, decoded."""
    path = tmp_path / "parts.mcap"
    path.write_bytes(content)
    with Recording.open(path) as recording:
        segments = [recording._segment(at).segment for at in range(len(recording._layout.segments))]
        keyframes = [
            msgspec.msgpack.decode(recording._layout.message(offset, length).data, type=Keyframe)
            for _, offset, length in recording._layout.keyframes
        ]
        return recording.header, segments, keyframes


class Parts(tuple):
    """Parts of a recording, without their megabyte of repr in a falsifying example."""

    def __repr__(self):
        return "Parts()"


@pytest.fixture(scope="module")
def parts(original, tmp_path_factory):
    """Header, segments and keyframes of the recording."""
    return Parts(parts_of(original[0], tmp_path_factory.mktemp("parts")))


COLUMN = st.one_of(
    st.binary(max_size=12),
    st.integers(1, 60).map(lambda n: b"\1" + bytes(range(n))),
    st.integers(1, 60).map(lambda n: b"\1" + b"\1" * n),
    st.just(b"\0"),
    st.integers(1, 9).map(lambda n: b"\x08" + b"\xff" * (8 * n)),
)
INTEGER = st.one_of(st.integers(-2, 70), st.sampled_from([2**31, -(2**63), 2**63 - 1, 2**40]))


def mutated(draw, value):
    """The value with one of its parts replaced, at any depth."""
    if isinstance(value, msgspec.Struct):
        name = draw(st.sampled_from(value.__struct_fields__))
        return msgspec.structs.replace(value, **{name: mutated(draw, getattr(value, name))})
    if isinstance(value, bytes):
        return draw(COLUMN)
    if isinstance(value, bool | int):
        return draw(INTEGER)
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.booleans()):
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated(draw, value[key])}
    if isinstance(value, list | tuple) and value:
        at = draw(st.integers(0, len(value) - 1))
        kind = draw(st.sampled_from(["change", "drop", "double"])) if isinstance(value, list) else "change"
        if kind == "change":
            items = [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
        else:
            items = [*value[:at], *([value[at]] * 2 if kind == "double" else []), *value[at + 1 :]]
        return items if isinstance(value, list) else tuple(items)
    return value


@given(data=st.data())
@FUZZ
def test_made_up_segments_and_keyframes_are_survived(parts, tmp_path, data):
    header, segments, keyframes = parts
    payloads = [("header", header), ("segment", segments[0]), ("segment", segments[1]), ("keyframe", keyframes[1])]
    payloads += [("segment", segment) for segment in segments[2:]]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, 4))
        payloads[at] = (payloads[at][0], mutated(data.draw, payloads[at][1]))
    path = tmp_path / "made_up.mcap"
    make_file(path, payloads)
    assert read_all(path)
    try:
        with Recording.open(path) as recording:
            audit(recording)
    except RecordingError:
        pass


@given(data=st.data())
@FUZZ
def test_made_up_indexes_are_survived(parts, tmp_path, data):
    header, segments, _ = parts
    n = len(segments)
    index = Index(
        num_steps=sum(segment.num_steps for segment in segments),
        duration_ns=5,
        num_requests=5,
        num_segments=n,
        segments=[data.draw(COLUMN) for _ in range(5)],
        num_keyframes=data.draw(INTEGER),
        keyframes=[data.draw(COLUMN) for _ in range(3)],
    )
    value = zstandard.compress(msgspec.msgpack.encode(mutated(data.draw, index)))
    path = tmp_path / "index.mcap"
    make_file(path, [("header", header), *(("segment", segment) for segment in segments)], [("index", value)])
    assert read_all(path)


def test_a_made_up_keyframe_costs_time_and_not_the_step(parts, tmp_path):
    """A keyframe that contradicts itself is passed over; the steps before it serve as well."""
    header, segments, keyframes = parts
    wrong = msgspec.structs.replace(keyframes[0], num_requests=keyframes[0].num_requests + 1)
    good, bad = tmp_path / "good.mcap", tmp_path / "bad.mcap"
    for path, keyframe in ((good, keyframes[0]), (bad, wrong)):
        rest = [("segment", segment) for segment in segments[1:]]
        make_file(path, [("header", header), ("segment", segments[0]), ("keyframe", keyframe), *rest])
    with Recording.open(good) as one, Recording.open(bad) as other:
        assert one.num_steps == other.num_steps > 20
        assert one.state_at(20).same_as(other.state_at(20)) == []


# -- bombs ----------------------------------------------------------------------------------------------------------


def peak_of(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def bomb():
    """A gigabyte of zeros in 32 KiB."""
    return zstandard.compress(bytes(1 << 30))


def chunk(content, size, crc=0):
    """A chunk record that says that its content decompresses to `size` bytes."""
    head = struct.pack("<QQQI", 0, 0, size, crc) + struct.pack("<I", 4) + b"zstd" + struct.pack("<Q", len(content))
    return struct.pack("<BQ", container.CHUNK, len(head) + len(content)) + head + content


def start_of(content):
    """The file up to its second chunk."""
    file = io.BytesIO(content)
    chunks = [record for record in container.records(file, len(content)) if record.opcode == container.CHUNK]
    return content[: chunks[1].offset - 9]


@pytest.mark.parametrize("told", [1 << 40, 1 << 30, 100])
def test_a_chunk_that_would_decompress_to_a_gigabyte_is_not_decompressed(original, bomb, tmp_path, told):
    content, _ = original
    path = tmp_path / "bomb.mcap"
    path.write_bytes(start_of(content) + chunk(bomb, told))
    assert peak_of(lambda: read_all(path)) < 50 << 20
    with Recording.open(path) as recording:
        assert (recording.num_steps, recording.complete) == (0, False)


def test_a_frame_that_does_not_say_its_size_gets_no_more_room_than_its_chunk_says(original, tmp_path):
    content, _ = original
    compressor = zstandard.ZstdCompressor().compressobj()
    bomb = compressor.compress(bytes(100 << 20)) + compressor.flush()
    path = tmp_path / "bomb.mcap"
    path.write_bytes(start_of(content) + chunk(bomb, 1000))
    assert peak_of(lambda: read_all(path)) < 50 << 20


def test_an_attachment_that_would_decompress_to_a_gigabyte_is_not_decompressed(parts, bomb, tmp_path):
    header, segments, _ = parts
    path = tmp_path / "bomb.mcap"
    payloads = [("header", header), ("segment", segments[0])]
    make_file(path, payloads, [("index", bomb)])
    assert peak_of(lambda: read_all(path)) < 50 << 20
    with Recording.open(path) as recording:
        assert (recording.num_steps, recording.complete) == (segments[0].num_steps, False)


def test_columns_that_claim_billions_of_rows_are_refused(parts, tmp_path):
    header, segments, _ = parts
    counts = b"\x08" + struct.pack("<q", 1 << 40) * segments[0].num_steps
    path = tmp_path / "rows.mcap"
    for name in ("ops", "batch", "tokens"):
        columns = [counts, *([b"\0"] * (len(getattr(segments[0], name)) - 1))]
        wrong = msgspec.structs.replace(segments[0], **{name: columns})
        make_file(path, [("header", header), ("segment", wrong)])
        assert peak_of(lambda: read_all(path)) < 80 << 20


def test_a_pool_larger_than_memory_is_refused(tmp_path):
    path = tmp_path / "huge.mcap"
    for changes in ({"num_blocks": 2**40}, {"num_cpu_blocks": 2**40}, {"num_blocks": -1}):
        make_file(path, [("header", make_header(**changes))])
        with pytest.raises(RecordingError, match="recordings have up to"):
            Recording.open(path)


def test_a_wrong_checksum_ends_the_readable_part(original, tmp_path):
    content, steps = original
    file = io.BytesIO(content)
    chunks = [record for record in container.records(file, len(content)) if record.opcode == container.CHUNK]
    at = chunks[3].offset + 24
    path = tmp_path / "crc.mcap"
    changed = bytearray(content)
    changed[at] ^= 1
    path.write_bytes(changed)
    with Recording.open(path) as recording:
        assert recording.complete
        got = []
        with pytest.raises(RecordingError, match=r"steps 9 to 17 cannot be read \(a chunk's checksum is wrong\)"):
            got.extend(recording.steps())
        assert list(recording.steps(0, 9)) == steps[:9]
        assert list(recording.steps(18)) == steps[18:]
        assert recording.state_at(len(steps) - 1).step == len(steps) - 1
    path.write_bytes(changed[:-100])
    with Recording.open(path) as recording:
        assert not recording.complete
        assert list(recording.steps()) == steps[:9]


def test_damage_to_a_short_recording_costs_its_own_steps_and_texts_and_no_more(tmp_path, monkeypatch):
    """A short recording has no vocabulary of its own: the segments have it, so a damaged one takes texts with it."""
    monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 9)
    monkeypatch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
    header, messages = simulated_trace(seed=6, num_requests=5)
    steps = [message for message in messages if isinstance(message, StepTrace)]
    path = tmp_path / "short.mcap"
    with RecordingWriter(path, header) as writer:
        for message in messages:
            writer(message)
    with Recording.open(path) as recording:
        offset, length = recording._layout.segments[1, 2:4].tolist()
    content = bytearray(path.read_bytes())
    content[offset + length // 2] ^= 1
    path.write_bytes(content)
    with Recording.open(path) as recording:
        assert recording.complete
        assert list(recording.steps(0, 9)) == steps[:9]
        with pytest.raises(RecordingError, match="steps 9 to 17 cannot be read"):
            list(recording.steps())
        later = list(recording.steps(18))
        assert [step.ops for step in later] == [step.ops for step in steps[18:]]
        got_tokens = [token for step in later for token in step.tokens]
        tokens = [token for step in steps[18:] for token in step.tokens]
        pairs = list(zip(got_tokens, tokens, strict=True))
        assert all(got == was or (got.token_id, got.text) == (-1, "\ufffd") for got, was in pairs)
        assert any(got == was for got, was in pairs)


def test_millions_of_tiny_records_are_not_gone_through(original, tmp_path):
    content, _ = original
    path = tmp_path / "tiny.mcap"
    path.write_bytes(start_of(content) + struct.pack("<BQ", 0x80, 0) * 200_000)
    read = []
    with pytest.MonkeyPatch.context() as patch:
        exactly = container.read_exactly
        patch.setattr(container, "read_exactly", lambda *where: (read.append(where), exactly(*where))[1])
        with Recording.open(path) as recording:
            assert recording.num_steps == 0
    assert len(read) < 500


def test_every_error_of_a_part_is_known_to_the_reader():
    """What decoding can raise is what the reader turns into a RecordingError."""
    for error in (msgspec.DecodeError, msgspec.ValidationError, container.DamagedError, UnicodeDecodeError):
        assert issubclass(error, DAMAGE)
    assert not issubclass(MemoryError, DAMAGE)


def test_text_with_invalid_utf8_is_damage(tmp_path):
    build = TraceBuilder()
    build.step()
    path = tmp_path / "a.mcap"
    with RecordingWriter(path, build.header) as writer:
        writer(build.messages[0])
    header, segments, _ = parts_of(path.read_bytes(), tmp_path)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(segments[0], vocabulary_texts=["abcd"]))
    make_file(path, [("header", header), ("segment", payload.replace(b"abcd", b"\xff\xfe\xfd\xfc"))])
    with Recording.open(path) as recording:
        assert recording.num_steps == 0


def test_checksums_in_the_file_are_those_of_the_format(original):
    content, _ = original
    file = io.BytesIO(content)
    record = next(r for r in container.records(file, len(content)) if r.opcode == container.CHUNK)
    data = container.read_exactly(file, record.offset, record.length)
    size, crc = struct.unpack_from("<QI", data, 16)
    content = zstandard.decompress(data[28 + 4 + 4 + 8 :][:])
    assert (len(content), zlib.crc32(content)) == (size, crc)
