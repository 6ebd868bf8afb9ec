"""Zip archives that torch.save has written, read in ranges. What one says of itself is first compared with its length."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from ...disk.errors import CheckpointError, DamagedCheckpointError, shown
from ..stored import ReadBytes
from .items import CENTRAL, END, END64, IN_EXTRA, LOCAL, LOCATOR

SIGNATURE = b"PK\3\4"  # what torch.load takes for the beginning of an archive

_EXTRA = struct.Struct("<2H")  # kind and size of an extra field
_EDGE = 1024  # bytes that are read at each end first: they have the headers and the directory of what `items.py` writes
_WINDOW = 1 << 20  # bytes of which a checksum is computed at a time


class ArchivedFile(NamedTuple):
    """A record: a file in the archive, as the directory describes it.   offset: of its local header."""

    name: str
    offset: int
    nbytes: int
    crc: int
    flags: int
    method: int


class Archive:
    """An archive of `length` bytes, with one folder: the names of its records begin with `root`.

    read: gives bytes of the archive.   where: its name in messages.   most: the most bytes that its directory, or a record that
    `contents` reads, may have.   has_crcs: whether it has checksums: not after torch.serialization.set_crc32_options(False).
    Raises DamagedCheckpointError for what is no archive, is cut off or damaged, for compressed and encrypted records, for those
    that overlap, for names that torch does not distinguish, and for what two readers of archives would read differently.
    """

    def __init__(self, read: ReadBytes, length: int, where: str, most: int | None = None) -> None:
        self.length, self._read, self._where = length, read, where
        self._most = length if most is None else most
        self._first = self._checked(0, min(length, _EDGE))
        self._last_start = max(0, length - _EDGE)
        self._last = self._first if length <= _EDGE else self._checked(self._last_start, length - self._last_start)
        found = self._directory()
        self.records = {record.name: record for record in found}
        roots = [name.removesuffix("data.pkl") for name in self.records if name.endswith("/data.pkl")]
        # Hazard: torch ignores the case of names, so that it might unpickle another record than this.
        if len(roots) != 1 or len({name.lower() for name in self.records}) < len(found):
            raise self.error(
                f"expected the archive of one torch.save; found the records {shown([each.name for each in found])}"
            )
        self.root = roots[0]
        if (stored := sum(record.nbytes for record in found)) > length:
            raise self.error(
                f"its records have {stored} bytes, and it has {length}: they are compressed, or overlap; save with plain "
                "torch.save"
            )
        # Hazard: a checksum of 0 has to be compared as well, since what was lost on the disk is often read as zeros.
        self.has_crcs = any(record.crc for record in found)

    def error(self, message: str) -> CheckpointError:
        """The error for a damaged archive."""
        return DamagedCheckpointError(f"{self._where}: {message}")

    def contents(self, record: ArchivedFile) -> bytes:
        """The bytes of a small record, verified."""
        if record.nbytes > self._most:
            raise self.error(f"record {shown(record.name)} has {record.nbytes} bytes; expected {self._most} at most")
        found = self._bytes(self.data_start(record), record.nbytes)
        self._compare(record, zlib.crc32(found))
        return found

    def data_start(self, record: ArchivedFile) -> int:
        """Where the bytes of a record begin in the archive. Raises if they are encrypted or compressed."""
        signature, _, flags, method, *_, name_length, extra_length = LOCAL.unpack(self._bytes(record.offset, LOCAL.size))
        if signature != SIGNATURE:
            raise self.error(f"no record where the archive's directory has {shown(record.name)}; the file is damaged")
        if (record.flags | flags) & 1 or record.method or method:
            kind = "encrypted" if (record.flags | flags) & 1 else "compressed"
            raise self.error(
                f"record {shown(record.name)} is {kind}; expected one that is stored as it is: save with plain torch.save"
            )
        start = record.offset + LOCAL.size + name_length + extra_length
        if start + record.nbytes > self.length:
            raise self.error(
                f"record {shown(record.name)} of {record.nbytes} bytes ends behind the item; the file is damaged or cut off"
            )
        return start

    def verify(self) -> bool:
        """Read all records, and compare their checksums; False if the archive has none."""
        for record in self.records.values() if self.has_crcs else ():
            start, crc = self.data_start(record), 0
            for place in range(start, start + record.nbytes, _WINDOW):
                crc = zlib.crc32(self._checked(place, min(_WINDOW, start + record.nbytes - place)), crc)
            self._compare(record, crc)
        return self.has_crcs

    def _compare(self, record: ArchivedFile, crc: int) -> None:
        if self.has_crcs and crc != record.crc:
            raise DamagedCheckpointError(
                f"{self._where} is damaged: the checksum of record {shown(record.name)} is {crc:08x}, not {record.crc:08x}; "
                "load an older checkpoint"
            )

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.length:
            raise self.error(
                f"its archive refers to bytes {offset} to {offset + size} of {self.length}; the file is damaged or cut off"
            )
        if offset + size <= len(self._first):
            return self._first[offset : offset + size]
        if offset >= self._last_start:
            return self._last[offset - self._last_start :][:size]
        return self._checked(offset, size)

    def _checked(self, offset: int, size: int) -> bytes:
        found = self._read(offset, size)
        if len(found) != size:
            raise self.error(f"expected {size} bytes at {offset}, found {len(found)}; the file is cut off")
        return found

    def _directory(self) -> list[ArchivedFile]:
        end = self._last.rfind(b"PK\5\6")
        if end < 0 or len(self._last) - end < END.size:
            raise self.error(
                "no zip archive ends here, as torch.save writes one; the file is damaged, cut off, or of another format"
            )
        *_, count, nbytes, start, _ = END.unpack_from(self._last, end)
        locator = self._last_start + end - LOCATOR.size
        if locator >= 0 and self._bytes(locator, 4) == b"PK\6\7":
            _, _, position, _ = LOCATOR.unpack(self._bytes(locator, LOCATOR.size))
            signature, *_, count, nbytes, start = END64.unpack(self._bytes(position, END64.size))
            if signature != b"PK\6\6" or position + END64.size != locator:
                raise self.error("no Zip64 end of an archive lies before its locator; the file is damaged")
        if nbytes > self._most:
            raise self.error(f"an archive whose directory has {nbytes} bytes; expected {self._most} at most")
        return self._records(self._bytes(start, nbytes), count)

    def _records(self, directory: bytes, count: int) -> list[ArchivedFile]:
        found, place = list[ArchivedFile](), 0
        for _ in range(count):
            if directory[place : place + 4] != b"PK\1\2" or place + CENTRAL.size > len(directory):
                raise self.error("the archive's directory is damaged")
            fields = CENTRAL.unpack_from(directory, place)
            flags, method, crc, stored, nbytes, name_length, extra_length, comment_length = (*fields[3:5], *fields[7:13])
            place += CENTRAL.size
            name = directory[place : place + name_length].decode("utf-8", "replace")
            extra = directory[place + name_length : place + name_length + extra_length]
            nbytes, _, offset = self._with_zip64(name, (nbytes, stored, fields[16]), extra)
            found.append(ArchivedFile(name, offset, nbytes, crc, flags, method))
            place += name_length + extra_length + comment_length
        return found

    def _with_zip64(self, name: str, sizes: tuple[int, int, int], extra: bytes) -> list[int]:
        """Size, stored size and offset of a record; those that do not fit 32 bits come from the Zip64 field of `extra`."""
        fields, place = list[bytes](), 0
        while len(extra) >= place + 4:
            kind, size = _EXTRA.unpack_from(extra, place)
            if kind == 1:
                fields.append(extra[place + 4 : place + 4 + size])
            place += 4 + size
        field = b"".join(fields)
        # Hazard: of two such fields, some readers take the first one and others the last one.
        if len(fields) > 1 or len(field) < 8 * sizes.count(IN_EXTRA):
            raise self.error(
                f"record {shown(name)} has {len(fields)} Zip64 fields of {len(field)} bytes; expected one, with each size that "
                "does not fit 32 bits"
            )
        found = []
        for value in sizes:
            if value == IN_EXTRA:
                value, field = int.from_bytes(field[:8], "little"), field[8:]
            found.append(value)
        return found
