"""Verifies what is read of an item while it is in the processor's cache."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass

from ..disk.errors import DamagedCheckpointError
from ..disk.files import Reader
from ..formats.stored import StoredItem
from ..formats.torch_file.items import BLOCK


@dataclass(frozen=True, slots=True)
class StoredItemBytes:
    """An item of a file, and reads of its bytes. Offsets count from the start of the item, in bytes.

    position: where the item begins in the file.   where: file and tensor, for messages.
    """

    reader: Reader
    position: int
    item: StoredItem
    where: str

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reader.read_into(self.position + offset, [buffer])

    def read(self, offset: int, nbytes: int) -> bytearray:
        return self.reader.read(self.position + offset, nbytes)


class Checksums:
    """Compares a range of an item's memory, which `feed` gets in order, with the checksums that the item has.

    An item of more than 16 KiB that shardrt wrote has one for each block of 16 KiB; if the range has only a part of a block,
    the rest is read as well. Other items have one for all of their memory, or none: then a part of it is not verified.
    """

    def __init__(self, source: StoredItemBytes, start: int, stop: int) -> None:
        """start, stop: the range, in bytes from the start of the item."""
        item = source.item
        self._source = source
        self._block = BLOCK if item.crcs_start is not None else max(1, item.data_nbytes)
        self._place = begin = start - item.data_start  # in the item's memory, as all that follows
        end = stop - item.data_start
        first, last = begin // self._block, -(-end // self._block)
        self._lead, self._rest = begin - first * self._block, min(last * self._block, item.data_nbytes) - end
        if item.crcs_start is None and (self._lead or self._rest or item.crc is None):
            first = last = self._lead = self._rest = 0
        self._first, self._expected, self._crc = first, self._values(first, last), 0

    def begin(self) -> None:
        """Read the part of the first block that lies before the range."""
        if self._lead:
            self._place -= self._lead
            self.feed(memoryview(self._source.read(self._source.item.data_start + self._place, self._lead)))

    def feed(self, view: memoryview) -> None:
        """Take the next bytes of the range. Raises CheckpointError if a block that ends in them is damaged."""
        start = 0
        while start < len(view):
            index, within = divmod(self._place, self._block)
            if whole := 0 if within else self._feed_blocks(index, view[start:]):
                self._place += whole
                start += whole
                continue
            nbytes = min(self._block - within, len(view) - start)
            if 0 <= index - self._first < len(self._expected):
                self._crc = zlib.crc32(view[start : start + nbytes], self._crc if within else 0)
                if within + nbytes == min(self._block, self._source.item.data_nbytes - index * self._block):
                    self._compare(index, self._crc)
            self._place += nbytes
            start += nbytes

    def _feed_blocks(self, first: int, view: memoryview) -> int:
        """Verify the whole blocks that `view` begins with; returns their bytes. Cost: half as much as `feed` for each block."""
        if self._block != BLOCK or first < self._first:
            return 0
        expected = self._expected[first - self._first :][: len(view) // BLOCK]
        found = [zlib.crc32(view[start : start + BLOCK]) for start in range(0, BLOCK * len(expected), BLOCK)]
        if found != expected.tolist():
            for index, crc in enumerate(found, first):
                self._compare(index, crc)
        return BLOCK * len(expected)

    def end(self) -> None:
        """Read the part of the last block that lies behind the range."""
        if self._rest:
            self.feed(memoryview(self._source.read(self._source.item.data_start + self._place, self._rest)))

    def _values(self, first: int, last: int) -> array[int]:
        item = self._source.item
        if first >= last:
            return array("I")
        if item.crcs_start is None:
            assert item.crc is not None, "compared only where there is one"
            return array("I", [item.crc])
        return array("I", self._source.read(item.crcs_start + 4 * first, 4 * (last - first)))

    def _compare(self, index: int, crc: int) -> None:
        expected = self._expected[index - self._first]
        if crc == expected:
            return
        item, start = self._source.item, index * self._block
        raise DamagedCheckpointError(
            f"{self._source.where} is damaged: the checksum of {min(self._block, item.data_nbytes - start)} bytes at "
            f"{self._source.position + item.data_start + start} is {crc:08x}, expected {expected:08x}; load an older "
            "checkpoint"
        )
