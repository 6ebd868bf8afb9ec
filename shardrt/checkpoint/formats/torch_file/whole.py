"""The checksum of a whole archive, in the comment at its end, which torch and other readers of zip archives pass over.

Those in an archive are of its records: its headers and directory have none, and readers of archives do not agree on what
damage in them means.
"""

from __future__ import annotations

import zlib

from ...disk.errors import DamagedCheckpointError

_MARK = b"shardrt-crc32:"
_DIGITS = 8  # hexadecimal, so that they are never taken for a signature of the archive
_NBYTES = len(_MARK) + _DIGITS


def with_checksum(archive: bytes) -> bytes:
    """The archive, which has no comment, with a comment that has the CRC-32 of all that is before it."""
    before = archive[:-2] + _NBYTES.to_bytes(2, "little") + _MARK  # its last field is the length of the comment
    return before + b"%08x" % zlib.crc32(before)


def check_whole(archive: bytes, where: str) -> bool:
    """Whether it has the checksum of `with_checksum`. Raises DamagedCheckpointError if it does not fit.

    where: the archive's name in messages.
    """
    before, digits = archive[:-_DIGITS], archive[-_DIGITS:]
    if not before.endswith(_MARK):
        return False
    found = b"%08x" % zlib.crc32(before)
    if found != digits:
        raise DamagedCheckpointError(
            f"{where} is damaged: the checksum of its {len(archive)} bytes is {found.decode()}, expected "
            f"{digits.decode('ascii', 'replace')}; load an older checkpoint"
        )
    return True
