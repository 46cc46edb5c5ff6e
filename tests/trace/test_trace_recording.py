"""Recordings: what was live comes back, at every step, from whole files and from those of killed processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import mcap.reader
import msgspec
import pytest
from trace_builder import TraceBuilder, arrived, fill, make_header, simulated_trace

from engine.trace import recording as recording_module
from engine.trace.events import Counters, Reason, RequestArrived, StepTrace
from engine.trace.file_format import RecordingError
from engine.trace.invariants import check
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState


@pytest.fixture
def small_parts(monkeypatch):
    """Many segments and keyframes in a short recording, and none of them by the clock."""
    monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 7)
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", 10)
    monkeypatch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)


def write(path, header, messages):
    with RecordingWriter(path, header) as writer:
        writer(header)
        for message in messages:
            writer(message)
    return path


def steps_of(messages):
    return [message for message in messages if isinstance(message, StepTrace)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "memory", [{}, {"num_blocks": 15, "num_cpu_blocks": 20, "sliding_window": 10}], ids=["whole", "window"]
)
def test_live_and_replayed_states_are_equal_at_every_step(tmp_path, memory):
    path = tmp_path / "run.mcap"
    live: list[PoolState] = []
    states: list[PoolState] = []
    writers: list[RecordingWriter] = []

    def state_sink(header):
        live.append(PoolState(header))
        return live[0].apply

    def writer_sink(header):
        writers.append(RecordingWriter(path, header))
        return writers[0]

    _, messages = simulated_trace(
        seed=1, sinks=[state_sink, writer_sink], each_step=lambda: states.append(live[0].copy()), **memory
    )
    if memory:
        decided = [d for message in messages if isinstance(message, StepTrace) for d in message.decisions]
        assert {d.reason for d in decided if "behind" in d.numbers} == {Reason.FITS, Reason.SWAPPED_IN}
        assert live[0].violations == []
    writers[0].close()
    with Recording.open(path) as recording:
        assert recording.complete
        assert recording.num_steps == len(states) > 100
        assert list(recording.messages()) == messages
        replayed = PoolState(recording.header)
        for message in recording.messages():
            replayed.apply(message)
            if isinstance(message, StepTrace):
                assert replayed.same_as(states[message.index]) == []
        for step, state in enumerate(states):
            assert recording.state_at(step).same_as(state) == []


@pytest.mark.usefixtures("small_parts")
def test_the_text_of_a_sought_state_is_read_when_it_is_asked_for_and_copies_share_nothing(tmp_path):
    header, messages = simulated_trace(seed=1, num_requests=12)
    folded = PoolState(header)
    with Recording.open(write(tmp_path / "a.mcap", header, messages)) as recording:
        step = next(step for step, _, _ in recording._layout.keyframes if step >= 20)
        for message in messages:
            folded.apply(message)
            if folded.step == step and isinstance(message, StepTrace):
                break
        sought = recording.state_at(step)
        assert any(request.stored is not None for request in sought.requests.values()), "nothing was asked for yet"
        copy = sought.copy()
        for number, request in folded.requests.items():
            assert sought.requests[number].num_tokens == len(request.token_ids)
            assert sought.requests[number].num_output_tokens == request.num_output_tokens
            copy.requests[number].pieces.append("more")
            copy.requests[number].token_ids.append(1)
            assert sought.requests[number].pieces == request.pieces
            assert sought.requests[number].token_ids == request.token_ids
        with pytest.raises(AttributeError, match="a request has no tokens"):
            _ = request.tokens


@pytest.mark.usefixtures("small_parts")
def test_what_went_in_comes_out(tmp_path):
    header, messages = simulated_trace(seed=2, num_requests=12)
    with Recording.open(write(tmp_path / "a.mcap", header, messages)) as recording:
        steps = steps_of(messages)
        last = steps[-1]
        assert recording.header == header
        assert recording.num_steps == len(steps)
        assert list(recording.steps()) == steps
        assert list(recording.steps(5, 23)) == steps[5:23]
        assert list(recording.steps(len(steps) - 1)) == [last]
        assert list(recording.steps(9, 9)) == list(recording.steps(10**9)) == []
        arrivals = [message for message in messages if isinstance(message, RequestArrived)]
        assert list(recording.requests()) == arrivals
        assert recording.num_requests == len(arrivals)
        end = last.start_ns + last.schedule_ns + last.execute_ns + last.sample_ns + last.update_ns
        assert recording.duration_ns == end
        assert recording.state_at(-1).same_as(PoolState(header)) == []
        with pytest.raises(IndexError, match="it has steps 0 to"):
            recording.state_at(len(steps))


@pytest.mark.usefixtures("small_parts")
def test_arrivals_come_before_the_step_that_they_came_before(tmp_path):
    build = TraceBuilder()
    build.arrive(0)
    for number in range(1, 20):
        build.step()
        build.arrive(number)
    build.step()
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        for start in range(20):
            got = list(recording.messages(start, start + 1))
            assert got == build.messages[2 * start : 2 * start + 2]


def test_requests_after_the_last_step_are_kept(tmp_path):
    build = TraceBuilder()
    build.arrive(0)
    build.step()
    build.arrive(1)
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        assert [arrival.request for arrival in recording.requests()] == [0, 1]
        assert list(recording.messages()) == build.messages[:2]
        assert recording.num_steps == 1


def test_a_flood_of_requests_before_the_first_step_is_recorded(tmp_path):
    """More prompt tokens than a segment closes at, and no step to close it with."""
    build = TraceBuilder()
    build.arrive(*range(30), num_tokens=3000)
    build.step()
    build.arrive(30)
    build.step()
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        assert list(recording.messages()) == build.messages


def test_a_recording_of_nothing_can_be_opened(tmp_path):
    header = make_header()
    with Recording.open(write(tmp_path / "a.mcap", header, [])) as recording:
        assert (recording.num_steps, recording.duration_ns, recording.complete) == (0, 0, True)
        assert list(recording.messages()) == []
        assert recording.state_at(-1).same_as(PoolState(header)) == []


def test_text_that_utf8_cannot_hold_is_replaced_and_ends_nothing(tmp_path):
    build = TraceBuilder(make_header(title="t\udcff"))
    build.messages.append(arrived(0, 2, name="n\ud800", prompt_pieces=["\ud800", "ok"]))
    build.state.apply(build.messages[0])
    build.step(tokens=[(0, 5, "\udfff")], finished=[(0, "error", "bad \ud800")])
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        request = recording.state_at(0).requests[0]
        assert (recording.header.title, request.name, request.message) == ("t?", "n?", "bad ?")
        assert request.pieces == ["?", "ok", "?"]


def test_numbers_of_any_size_that_fit_64_bits_come_back(tmp_path):
    build = TraceBuilder()
    build.arrive(0)
    big, small = 2**63 - 1, -(2**63)
    step = build.step(batch=[(0, 1, big, 1), (0, 1, small, big)], tokens=[(big, small, "x")])
    step = msgspec.structs.replace(
        step,
        start_ns=big,
        execute_ns=small,
        counters=Counters(*[small, big] * 5),
        ops=[(2, 1, big, 3), (3, 2, small, 0)],
    )
    with Recording.open(write(tmp_path / "a.mcap", build.header, [build.messages[0], step])) as recording:
        assert list(recording.steps()) == [step]


def test_a_trace_whose_references_do_not_add_up_is_recorded_and_replayed(tmp_path):
    from trace_builder import allocate, release

    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [0], 4)
    build.step(release(0, 0), release(0, 0))
    build.step(allocate(0, 0, 0))
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        state = recording.state_at(2)
        assert state.same_as(build.state) == []
        assert [(v.name, v.block, v.step) for v in state.violations] == [("free_queue", 0, 1)]


# -- cut off, killed, not a recording --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_module, "SEGMENT_STEPS", 7)
        patch.setattr(recording_module, "KEYFRAME_STEPS", 10)
        patch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
        header, messages = simulated_trace(seed=4, num_requests=10)
        path = write(tmp_path_factory.mktemp("whole") / "whole.mcap", header, messages)
    return path, header, messages


def test_a_file_cut_off_anywhere_has_its_whole_segments_or_says_that_it_has_none(whole, tmp_path):
    path, header, messages = whole
    data = path.read_bytes()
    steps = steps_of(messages)
    cut = tmp_path / "cut.mcap"
    lengths = []
    lines = []
    for size in range(0, len(data), 211):
        cut.write_bytes(data[:size])
        try:
            recording = Recording.open(cut)
        except RecordingError as error:
            lines.append(str(error))
            continue
        with recording:
            assert recording.header == header
            assert list(recording.steps()) == steps[: recording.num_steps]
            lengths.append(recording.num_steps)
            if size < len(data) - 2000:
                assert not recording.complete
            if recording.num_steps:
                last = recording.num_steps - 1
                assert check(recording.state_at(last)) == []
                assert recording.duration_ns >= steps[last].start_ns
    assert all(str(cut) in line and "\n" not in line for line in lines)
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == len(steps)


def test_a_killed_process_loses_at_most_its_last_chunk(tmp_path):
    path = tmp_path / "killed.mcap"
    program = f"""
import os, signal, time
from trace_builder import simulated_trace
from engine.trace import recording
recording.SEGMENT_SECONDS = 0.05
header, messages = simulated_trace(seed=5, num_requests=10)
writer = recording.RecordingWriter({str(path)!r}, header)
for message in messages[:200]:
    writer(message)
while writer._pending:
    time.sleep(0.01)
time.sleep(0.2)
for message in messages[200:]:
    writer(message)
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    _, messages = simulated_trace(seed=5, num_requests=10)
    with Recording.open(path) as recording:
        assert not recording.complete
        got = [message.index for message in recording.messages() if isinstance(message, StepTrace)]
        assert got == list(range(recording.num_steps))
        assert recording.num_steps >= len(steps_of(messages[:200]))
        assert check(recording.state_at(recording.num_steps - 1)) == []


def test_steps_reach_the_file_without_more_steps_coming(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "SEGMENT_SECONDS", 0.01)
    build = TraceBuilder()
    build.step()
    writer = RecordingWriter(tmp_path / "a.mcap", build.header)
    written = threading.Event()
    write_segment = writer._write_segment

    def note(messages):
        write_segment(messages)
        written.set()

    writer._write_segment = note
    writer(build.messages[0])
    assert written.wait(20)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert (recording.num_steps, recording.complete) == (1, False)
    writer.close()


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path, monkeypatch):
    build = TraceBuilder()
    for _ in range(5):
        build.step()
    writer = RecordingWriter(tmp_path / "a.mcap", build.header)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_add", full)
    for message in build.messages:
        writer(message)
    with pytest.raises(RecordingError, match=r"a\.mcap ended early: No space left on device"):
        writer.close()
    assert isinstance(writer.error, RecordingError)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert recording.num_steps == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_from_the_start_is_one_clear_line():
    with pytest.raises(RecordingError, match="cannot record to /dev/full: No space left on device"):
        RecordingWriter("/dev/full", make_header())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_while_recording_is_one_clear_line(tmp_path):
    build = TraceBuilder()
    for _ in range(5):
        build.step()
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, build.header)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    os.close(full)
    for message in build.messages:
        writer(message)
    with pytest.raises(RecordingError, match=r"a\.mcap ended early: No space left on device"):
        writer.close()
    with pytest.raises(RecordingError, match="ended early"):
        writer.close()
    with Recording.open(path) as recording:
        assert (recording.num_steps, recording.complete) == (0, False)


def test_a_pool_that_no_reader_takes_is_not_recorded(tmp_path):
    with pytest.raises(RecordingError, match="a pool of 4194305 blocks cannot be recorded"):
        RecordingWriter(tmp_path / "a.mcap", make_header(num_blocks=(1 << 22) + 1))
    assert not (tmp_path / "a.mcap").exists()


def test_a_request_that_arrives_twice_keeps_its_first_text_after_a_seek(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 4)
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", 4)
    build = TraceBuilder()
    for message in (arrived(0, 3), arrived(0, 5)):
        build.messages.append(message)
        build.state.apply(message)
    for _ in range(6):
        build.step()
    with Recording.open(write(tmp_path / "a.mcap", build.header, build.messages)) as recording:
        keyframes = recording._layout.keyframes
        assert [step for step, _, _ in keyframes] == [3]
        read = []
        messages = recording.messages
        recording.messages = lambda start, stop: (read.append(start), messages(start, stop))[1]
        assert recording.state_at(5).same_as(build.state) == []
        assert read == [4]


def test_a_gap_in_the_steps_is_not_recorded(tmp_path):
    build = TraceBuilder()
    steps = [build.step() for _ in range(3)]
    writer = RecordingWriter(tmp_path / "a.mcap", build.header)
    writer(steps[0])
    writer(steps[2])
    with pytest.raises(RecordingError, match="step 2 came where step 1 was due"):
        writer.close()


def test_a_slow_disk_holds_the_engine_back_instead_of_filling_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "_MAX_PENDING", 50)
    monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 10**9)
    monkeypatch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
    build = TraceBuilder()
    longest = 0
    with RecordingWriter(tmp_path / "a.mcap", build.header) as writer:
        monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 20)
        writer._wake.set = lambda: None
        for _ in range(300):
            writer(build.step())
            longest = max(longest, len(writer._pending))
        del writer._wake.set
    assert longest <= 50
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert recording.num_steps == 300


def test_where_no_file_can_be_made_the_error_says_so(tmp_path):
    with pytest.raises(RecordingError, match=r"cannot record to .*No such file or directory"):
        RecordingWriter(tmp_path / "no" / "a.mcap", make_header())


def foreign_mcap(path):
    from mcap.writer import Writer

    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2")
        writer.finish()


def header_only(path, **changes):
    """A recording whose header says something else."""
    from mcap.writer import Writer

    header = msgspec.to_builtins(make_header())
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=1)
        writer.start(profile="kvtui")
        channel = writer.register_channel("header", "msgpack", 0)
        writer.add_message(channel, 0, msgspec.msgpack.encode(header | changes), 0)
        writer.finish()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no recording at"),
        (lambda path: path.mkdir(), "cannot read .*directory"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"# a text\n" * 100), "is not a recording"),
        (lambda path: path.write_bytes(b"\x89MC"), "is cut off after 3 bytes"),
        (lambda path: path.write_bytes(b"\x89MCAP0\r\n"), "is cut off after 8 bytes"),
        (foreign_mcap, "is an MCAP file, but not a kvtui recording .its profile is 'ros2'"),
        (
            lambda path: header_only(path, schema_version=2, block_size="another type"),
            r"was made by a newer kvtui \(schema 2\); this one reads up to 1: upgrade",
        ),
        (lambda path: header_only(path, num_blocks=2**31), "has a pool of 2147483648 blocks"),
        (lambda path: header_only(path, num_blocks=0), "has a pool of 0 blocks"),
        (lambda path: header_only(path, num_blocks="many"), "is damaged beyond use"),
    ],
)
def test_what_is_no_usable_recording_gets_one_clear_line(tmp_path, make, says):
    path = tmp_path / "bad.mcap"
    make(path)
    with pytest.raises(RecordingError, match=says) as caught:
        Recording.open(path)
    assert "\n" not in str(caught.value)


# -- the format ------------------------------------------------------------------------------------------------------


def test_any_mcap_reader_reads_the_file_and_its_schemas(whole):
    path, header, _ = whole
    with path.open("rb") as file:
        reader = mcap.reader.make_reader(file)
        summary = reader.get_summary()
        topics = [channel.topic for _, channel, _ in reader.iter_messages()]
        assert reader.get_header().profile == "kvtui"
        assert {record.name: record.metadata for record in reader.iter_metadata()}["kvtui"]["title"] == header.title
    assert topics[0] == "header"
    assert {"segment", "keyframe"} <= set(topics)
    assert {schema.name for schema in summary.schemas.values()} == {"Header", "Segment", "Keyframe"}
    for schema in summary.schemas.values():
        assert "properties" in schema.data.decode()
    assert summary.statistics.message_start_time >= int(header.started_at * 1e9) - 1000


def test_thirty_two_requests_take_less_than_200_bytes_a_step_and_4_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "SEGMENT_SECONDS", 60.0)
    from engine.bench.trace import realistic_trace

    header, messages = realistic_trace(num_steps=600)
    steps = steps_of(messages)
    assert sum(len(step.batch) for step in steps) / len(steps) > 28
    with RecordingWriter(tmp_path / "a.mcap", header) as writer:
        since_flush = 0
        for message in messages:
            writer(message)
            since_flush += isinstance(message, StepTrace)
            if since_flush == 33:  # As the clock would have it with steps of 60 ms.
                writer._write_pending(final=False)
                since_flush = 0
    prompts = sum(len(message.prompt_token_ids) for message in messages if isinstance(message, RequestArrived))
    tokens = prompts + sum(len(step.tokens) for step in steps)
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert recording.size <= 200 * len(steps) + 4 * tokens


@pytest.mark.usefixtures("small_parts")
def test_a_seek_reads_little_of_the_file(tmp_path):
    """The last step of a long recording is reached from the keyframe before it, not from the start."""
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [0], 4)
    one = build.messages[-1]
    path = tmp_path / "long.mcap"
    n = 3000
    with RecordingWriter(path, build.header) as writer:
        writer(build.messages[0])
        writer(one)
        for index in range(1, n):
            writer(msgspec.structs.replace(one, index=index, batch=[], ops=[], tokens=[], decisions=[]))
    with Recording.open(path) as recording:
        assert recording.num_steps == n
        read = []
        segment = recording._segment
        recording._segment = lambda at: (read.append(at), segment(at))[1]
        state = recording.state_at(n - 1)
        assert state.step == n - 1
        assert state.requests[0].num_tokens == 5
        assert len(set(read)) <= 5


def test_a_recording_of_600_000_events_opens_without_reading_them_and_its_last_one_is_reached(tmp_path):
    build = TraceBuilder(make_header(num_blocks=200))
    build.arrive(0, num_tokens=600)
    build.prefill(0, list(range(150)), 600)
    build.step(*(fill(block, 0, 4) for block in range(150)))
    one, num_steps = build.messages[-1], 4_000
    with RecordingWriter(tmp_path / "long.mcap", build.header) as writer:
        for message in build.messages[:-1]:
            writer(message)
        for index in range(1, num_steps):
            writer(msgspec.structs.replace(one, index=index))
    with Recording.open(tmp_path / "long.mcap") as recording:
        assert recording.num_steps == num_steps
        read = []
        segment = recording._segment
        recording._segment = lambda at: (read.append(at), segment(at))[1]
        state = recording.state_at(num_steps - 1)
        assert len(state.last_step.ops) == 150
        assert len(recording.parts.segments) > 8
        assert len(set(read)) <= 4
