"""The marks of a save: 64 bytes at the beginning and at the end of each of its files, which name the save and the file.

    magic (8 bytes)   version (4)   id of the save (16)   name of the file (32)   CRC-32 of what is before it (4)

`.metadata` has the id as well. So a load refuses a folder with files of two saves, which an interrupted copy over an older
checkpoint leaves, and a file that has the beginning of one save and the end of the other.
"""

from __future__ import annotations

import re
import secrets
import struct
import zlib
from typing import NamedTuple

from ...disk.errors import DamagedCheckpointError, shown
from ...disk.files import Reader
from .metadata_writer import SAVED_BY

MARK_NBYTES = 64
_FIELDS = struct.Struct("<8sI16s32s")
_CRC = struct.Struct("<I")
_MAGIC, _VERSION = b"shardrt\x93", 1
_SAVE_ID = re.compile(rf"{SAVED_BY}([0-9a-f]{{32}})")


class SaveMark(NamedTuple):
    """What a mark says.   save_id: 32 hexadecimal digits.   file: the name of the file, of at most 32 bytes."""

    save_id: str
    file: str

    def __str__(self) -> str:
        return f"{shown(self.file)} of save {self.save_id}"

    def encode(self) -> bytes:
        """The 64 bytes of the mark."""
        fields = _FIELDS.pack(_MAGIC, _VERSION, bytes.fromhex(self.save_id), self.file.encode())
        return fields + _CRC.pack(zlib.crc32(fields))


def new_save_id() -> str:
    """A random id of 32 hexadecimal digits, for one save. The random generators of the training stay as they are."""
    return secrets.token_hex(16)


def own_id(save_id: str | None) -> str | None:
    """The id of the save in the `save_id` of a `.metadata`; None if an older version of shardrt or another program wrote it."""
    match = _SAVE_ID.fullmatch(save_id or "")
    return None if match is None else match[1]


def check_marks(reader: Reader, save_id: str | None) -> None:
    """Raise CheckpointError if a file does not belong to the save of the `.metadata` beside it.

    save_id: that of `.metadata`; if shardrt did not write it, the file must have no marks.
    Cost: a read at each end of the file.
    """
    own, nbytes = own_id(save_id), reader.size()
    expected = None if own is None else SaveMark(own, reader.path.name)
    for verb, start in (("begins", 0), ("ends", nbytes - MARK_NBYTES)):
        found = _decoded(bytes(reader.read(start, MARK_NBYTES))) if nbytes >= MARK_NBYTES else None
        if found != expected:
            raise DamagedCheckpointError(
                f"{str(reader.path)!r} {verb} {_described(found)}; by .metadata, expected {_described(expected)}: the file was "
                "cut off, or the folder has files of several checkpoints, as an interrupted copy leaves them. Copy the "
                "checkpoint again, or load an older one"
            )


def _decoded(data: bytes) -> SaveMark | None:
    """The mark; None if these bytes are no mark."""
    magic, version, save_id, file = _FIELDS.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or zlib.crc32(data[: _FIELDS.size]) != _CRC.unpack_from(data, _FIELDS.size)[0]:
        return None
    return SaveMark(save_id.hex(), file.rstrip(b"\0").decode("utf-8", "replace"))


def _described(mark: SaveMark | None) -> str:
    return "without the mark of a save" if mark is None else f"as {mark}"
