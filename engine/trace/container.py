"""Reading MCAP files that may be truncated, damaged or hostile: sizes are checked before memory is taken for them.

Only what recordings need of the format (https://mcap.dev/spec): chunks of messages, attachments, and the index at the
file's end that finds attachments without looking at anything else.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = bytes((0x89, 0x4D, 0x43, 0x41, 0x50, 0x30, 0x0D, 0x0A))

HEADER, FOOTER, CHANNEL, MESSAGE, CHUNK = 0x01, 0x02, 0x04, 0x05, 0x06
ATTACHMENT, ATTACHMENT_INDEX, SUMMARY_OFFSET = 0x09, 0x0A, 0x0E

_MAX_INDEX = 1 << 20
"""Bytes of the parts of the summary section that are read."""

_RECORD = struct.Struct("<BQ")
_CHUNK_HEAD = struct.Struct("<QQQII")
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_FOOTER = struct.Struct("<QQI")
_FOOTER_LENGTH = _RECORD.size + _FOOTER.size + len(MAGIC)


class DamagedError(Exception):
    """A part of the file that cannot be read; says which and why."""


class Record(NamedTuple):
    """Where a record's content lies."""

    opcode: int
    offset: int
    length: int


class Message(NamedTuple):
    """A message of a chunk."""

    topic: str
    log_time: int
    data: memoryview


def read_exactly(file: BinaryIO, offset: int, length: int) -> bytes:
    """That many bytes from there.

    Raises:
        DamagedError: the file ends before.
    """
    file.seek(offset)
    data = file.read(length)
    if len(data) != length:
        raise DamagedError(f"the file ends at byte {offset + len(data)}, in the middle of something")
    return data


def records(file: BinaryIO, size: int) -> Iterator[Record]:
    """The records one after the other, up to the footer or the first that does not fit into the file."""
    offset = len(MAGIC)
    while offset + _RECORD.size <= size:
        opcode, length = _RECORD.unpack(read_exactly(file, offset, _RECORD.size))
        if length > size - offset - _RECORD.size:
            return
        yield Record(opcode, offset + _RECORD.size, length)
        if opcode == FOOTER:
            return
        offset += _RECORD.size + length


def read_profile(file: BinaryIO, size: int) -> str:
    """The profile that the file names in its first record.

    Raises:
        DamagedError: there is no such record.
    """
    record = next(records(file, size), None)
    if record is None or record.opcode != HEADER or record.length > _MAX_INDEX:
        raise DamagedError("it ends before its first record")
    return _Fields(read_exactly(file, record.offset, record.length)).text()


def read_chunk(file: BinaryIO, offset: int, length: int, topics: dict[int, str], limit: int) -> list[Message]:
    """The messages of the chunk whose content lies there, which may have `limit` bytes, compressed or not.

    `topics` takes in the channels that the chunk defines.

    Raises:
        DamagedError: it is not one, or its checksum is wrong, or it says that it is larger.
    """
    if length > limit:
        raise DamagedError(f"a chunk of {length} bytes is too large")
    data = _decompress_chunk(read_exactly(file, offset, length), limit)
    messages: list[Message] = []
    at = 0
    view = memoryview(data)
    while at + _RECORD.size <= len(data):
        opcode, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if size > len(data) - at:
            raise DamagedError("a record reaches beyond its chunk")
        content = view[at : at + size]
        at += size
        if opcode == CHANNEL:
            fields = _Fields(bytes(content))
            number = fields.number(2)
            fields.number(2)
            topics[number] = fields.text()
        elif opcode == MESSAGE:
            if size < _MESSAGE_HEAD.size:
                raise DamagedError("a message has no head")
            channel, _, log_time, _ = _MESSAGE_HEAD.unpack_from(content)
            messages.append(Message(topics.get(channel, ""), log_time, content[_MESSAGE_HEAD.size :]))
    return messages


def _decompress_chunk(data: bytes, limit: int) -> bytes:
    if len(data) < _CHUNK_HEAD.size:
        raise DamagedError("a chunk has no head")
    _, _, size, crc, name_length = _CHUNK_HEAD.unpack_from(data)
    fields = _Fields(data, _CHUNK_HEAD.size)
    compression = fields.raw(name_length)
    content = fields.raw(fields.number(8))
    if compression == b"zstd":
        content = decompress(content, size, limit)
    elif compression:
        raise DamagedError(f"a chunk is compressed as {compression[:20]!r}; recordings use zstd")
    if len(content) != size:
        raise DamagedError(f"a chunk has {len(content)} bytes instead of {size}")
    if crc and zlib.crc32(content) != crc:
        raise DamagedError("a chunk's checksum is wrong")
    return content


def decompress(data: bytes, size: int, limit: int) -> bytes:
    """The zstd frame's content, which says and has `size` bytes.

    Raises:
        DamagedError: it has not, or that is too much.
    """
    try:
        told = zstandard.frame_content_size(data)
        if size > limit or told not in (-1, size):
            raise DamagedError(f"it would decompress to {max(size, told)} bytes")
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=size) if size else b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"it does not decompress: {error}") from None
    if len(content) != size:
        raise DamagedError(f"it decompresses to {len(content)} bytes instead of {size}")
    return content


def find_attachments(file: BinaryIO, size: int) -> dict[str, Record]:
    """Where the attachments lie, by name, from the index at the file's end.

    Raises:
        DamagedError: the file has no complete index: its writer was killed, or it is truncated.
    """
    if size < 2 * len(MAGIC) + _FOOTER_LENGTH:
        raise DamagedError("it has no footer")
    tail = read_exactly(file, size - _FOOTER_LENGTH, _FOOTER_LENGTH)
    opcode, length = _RECORD.unpack_from(tail)
    if opcode != FOOTER or length != _FOOTER.size or not tail.endswith(MAGIC):
        raise DamagedError("it has no footer")
    _, offsets_start, _ = _FOOTER.unpack_from(tail, _RECORD.size)
    offsets_length = size - _FOOTER_LENGTH - offsets_start
    if not 0 < offsets_length <= _MAX_INDEX:
        raise DamagedError("its footer points nowhere")
    found: dict[str, Record] = {}
    for opcode, content in _split(read_exactly(file, offsets_start, offsets_length)):
        fields = _Fields(content)
        if opcode != SUMMARY_OFFSET or fields.number(1) != ATTACHMENT_INDEX:
            continue
        group_start, group_length = fields.number(8), fields.number(8)
        if not (group_start < size and group_length <= _MAX_INDEX):
            raise DamagedError("its index points nowhere")
        for _, entry in _split(read_exactly(file, group_start, group_length)):
            fields = _Fields(entry)
            offset, length = fields.number(8), fields.number(8)
            for _ in range(3):
                fields.number(8)
            found[fields.text()] = Record(ATTACHMENT, offset + _RECORD.size, length - _RECORD.size)
    return found


def read_attachment(file: BinaryIO, record: Record, limit: int) -> bytes:
    """An attachment's data.

    Raises:
        DamagedError: it is not one, or its checksum is wrong, or it is larger than the limit.
    """
    if not 0 <= record.length <= limit:
        raise DamagedError(f"an attachment of {record.length} bytes is not possible")
    content = read_exactly(file, record.offset, record.length)
    fields = _Fields(content)
    for _ in range(2):
        fields.number(8)
    fields.text()
    fields.text()
    data = fields.raw(fields.number(8))
    if zlib.crc32(content[: fields.at]) != fields.number(4):
        raise DamagedError("an attachment's checksum is wrong")
    return data


def _split(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _RECORD.size <= len(data):
        opcode, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if length > len(data) - at:
            raise DamagedError("its index is cut off")
        yield opcode, data[at : at + length]
        at += length


class _Fields:
    """Fields of a record, one after the other."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def raw(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise DamagedError("a record is too short")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.raw(width), "little")

    def text(self) -> str:
        return self.raw(self.number(4)).decode("utf-8", "replace")
