"""Small files that are made to exhaust what reads them: refused at once, in a short message, with little memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.__main__ import main
from shardrt.checkpoint.disk.files import METADATA
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.dcp.metadata_writer import TRAILER, MetadataWriter, ending
from shardrt.checkpoint.formats.safetensors import read_arrays
from shardrt.checkpoint.formats.torch_file.archive import Archive
from shardrt.checkpoint.formats.torch_file.expansion import check_archive
from shardrt.checkpoint.formats.torch_file.items import CENTRAL, END, END64, IN_EXTRA, LOCATOR
from shardrt.checkpoint.formats.torch_file.stored_items import read_item
from shardrt.checkpoint.state.entries import entries
from shardrt.checkpoint.state.objects import decode
from shardrt.comm.recorder import merge_dumps

SECONDS, MEGABYTES = 2.0, 200  # of the processor, which may be busy; alone, 0.2 s
LONGEST = 3000  # characters of a message

CLASSES = "torch.distributed.checkpoint.metadata"


@pytest.fixture(autouse=True)
def little_time_and_memory() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = memory("VmRSS"), time.process_time()
    yield
    assert time.process_time() - begin < SECONDS
    assert memory("VmHWM") - before < MEGABYTES


def memory(kind: str) -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def refused(call: Callable[[], object], error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        call()
    assert len(str(caught.value)) < LONGEST
    return str(caught.value)


# ---------------------------------------------------------------------- pickles


LEVELS = 60
# Pairs of shared pairs: a few bytes for each level, and twice as many values.
PAIRS = b"Nq\x000" + b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(LEVELS)) + b"h%c" % LEVELS
DEEP = b"]" * 20_000 + b"a" * 19_999
LONG = b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def made(name: str, fields: Mapping[str, bytes], module: str = CLASSES) -> bytes:
    """An object with these fields, which are opcodes."""
    state = b"".join(text(key) + value for key, value in fields.items())
    return f"c{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"


def tensor(size: bytes = b"K\x03\x85", chunks: bytes = b"]") -> bytes:
    properties = b"c%b\nTensorProperties\n" % CLASSES.encode() + b")\x81(ctorch\nfloat32\nNNNNtb"
    return made("TensorStorageMetadata", {"properties": properties, "size": size, "chunks": chunks})


def chunk(offsets: bytes = b"K\x00\x85", sizes: bytes = b"K\x03\x85") -> bytes:
    return made("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})


def info(path: bytes = text("a"), offset: bytes = b"K\x00", length: bytes = b"K\x09", **more: bytes) -> bytes:
    filesystem = "torch.distributed.checkpoint.filesystem"
    return made("_StorageInfo", {"relative_path": path, "offset": offset, "length": length, **more}, filesystem)


def index(fqn: bytes = text("w"), offset: bytes = b"K\x00\x85") -> bytes:
    return made("MetadataIndex", {"fqn": fqn, "offset": offset})


def metadata(
    state: bytes = text("w") + tensor(chunks=b"](" + chunk() + b"e"), storage: bytes = index() + info(), **more: bytes
) -> bytes:
    items = {"state_dict_metadata": b"}(" + state + b"u", "storage_data": b"}(" + storage + b"u", **more}
    return b"\x80\x04" + made("Metadata", items) + b"."


VALUES = {
    "index": b"J\xff\xff\xff\x7f",
    "pairs": PAIRS,
    "deep": DEEP,
    "long": LONG,
    "string": text("x" * 100_000),
    "none": b"N",
}
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda value: b"\x80\x04" + value + b".",
    "a key": lambda value: b"\x80\x04}" + value + b"Ns.",
    "keys": lambda value: b"\x80\x04}(" + value + b"Nu.",
    "keys of a dict": lambda value: b"\x80\x04(" + value + b"Nd.",
    "a set": lambda value: b"\x80\x04\x8f(" + value + b"\x90.",
    "a frozen set": lambda value: b"\x80\x04(" + value + b"\x91.",
    "a persistent id": lambda value: b"\x80\x04" + value + b"Q.",
    "arguments": lambda value: b"\x80\x04cpathlib\nPosixPath\n" + value + b"R.",
    "a state": lambda value: b"\x80\x04cpathlib\nPosixPath\n)\x81" + value + b"b.",
    "a size's argument": lambda value: b"\x80\x04ctorch\nSize\n" + value + b"\x85R.",
    "name": lambda value: metadata(state=value + tensor()),
    "size": lambda value: metadata(state=text("w") + tensor(size=value)),
    "chunks": lambda value: metadata(state=text("w") + tensor(chunks=value)),
    "offsets": lambda value: metadata(state=text("w") + tensor(chunks=b"](" + chunk(offsets=value) + b"e")),
    "sizes": lambda value: metadata(state=text("w") + tensor(chunks=b"](" + chunk(sizes=value) + b"e")),
    "fqn": lambda value: metadata(storage=index(fqn=value) + info()),
    "offset": lambda value: metadata(storage=index(offset=value) + info()),
    "path": lambda value: metadata(storage=index() + info(path=value)),
    "start": lambda value: metadata(storage=index() + info(offset=value)),
    "length": lambda value: metadata(storage=index() + info(length=value)),
    "storage": lambda value: metadata(storage=index() + value),
    "keys of a path": lambda value: metadata(planner_data=b"}" + text("w") + value + b"s"),
    "an index of a path": lambda value: metadata(planner_data=b"}" + text("w") + text("w") + value + b"\x86s"),
    "a key of a path": lambda value: metadata(planner_data=b"}" + text("w") + value + b"\x85s"),
    "extensions": lambda value: metadata(storage=index() + info(transform_descriptors=value)),
    "save_id": lambda value: metadata(storage_meta=made("StorageMeta", {"save_id": value})),
}


def all_of(folder: Path) -> None:
    """Everything that `.metadata` says."""
    stored = read_stored(folder)
    for name in stored.tensors:
        assert stored.tensors[name].chunks
    for name in stored.objects:
        assert stored.objects[name]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_any_value_at_any_place_of_metadata(place: str, value: str, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(PLACES[place](VALUES[value]))
    if (value == "none" and place in ("extensions", "save_id")) or (value == "index" and place in ("start", "length")):
        all_of(tmp_path)
    elif value == "string" and place == "path":
        all_of(tmp_path)  # a file that is not there
    elif value != "pairs" and place == "keys of a path":
        all_of(tmp_path)  # other data of a planner
    else:
        refused(lambda: all_of(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(["verify", str(tmp_path)]) == 1


def test_metadata_like_this_is_read(tmp_path: Path) -> None:
    """But for the value at one place, those above are whole."""
    (tmp_path / METADATA).write_bytes(metadata(planner_data=b"}" + text("w") + text("w") + b"\x85s"))
    stored = read_stored(tmp_path)
    assert stored.tensors["w"].chunks == [(((0,), (3,)), "a", 0, 9)]
    assert stored.paths == {"w": ("w",)}


def test_one_large_value_that_is_used_many_times(tmp_path: Path) -> None:
    """Which would be copied each time: as a state, as arguments, as sizes, as chunks."""
    many = 20_000
    large_dict = b"}(" + b"".join(text(f"k{n}") + b"N" for n in range(many)) + b"uq\x00"
    large_tuple = b"(" + b"K\x01" * many + b"tq\x00"
    path = b"cpathlib\nPosixPath\nq\x01"
    for data in (
        b"\x80\x04](" + large_dict + path + b"h\x01)\x81h\x00b" * many + b"e.",
        b"\x80\x04](" + large_dict + f"c{CLASSES}\nMetadata\n".encode() + b"q\x01" + b"h\x01)\x81h\x00b" * many + b"e.",
        b"\x80\x04](" + large_tuple + path + b"h\x01h\x00R" * many + b"e.",
        b"\x80\x04](" + large_tuple + b"ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * many + b"e.",
        metadata(state=text("w") + tensor(chunks=b"](" + chunk() + b"q\x00" + b"h\x00" * many + b"e")),
    ):
        (tmp_path / METADATA).write_bytes(data)
        refused(lambda: all_of(tmp_path))


# ---------------------------------------------------------------------- our own index


def with_index(data: bytes) -> bytes:
    """A `.metadata` of ours with this pickle as its index, and the right checksum."""
    out = io.BytesIO()
    MetadataWriter(out, []).finish()
    return out.getvalue() + data + TRAILER.pack(len(data), zlib.crc32(data), b"shardrt1") + ending("0" * 32)


ROWS: dict[str, tuple[Any, ...]] = {
    "a name that is a number": (3, ("w",), "float32", (3,), 0, 0, 0, 0, 0),
    "a path that is a list": ("w", ["w"], "float32", (3,), 0, 0, 0, 0, 0),
    "a path in a path": ("w", (("w",),), "float32", (3,), 0, 0, 0, 0, 0),
    "a long path": ("w", ("w",) * 100_000, "float32", (3,), 0, 0, 0, 0, 0),
    "a name of many keys": ("." * 100_000, ("w",), "float32", (3,), 0, 0, 0, 0, 0),
    "a dtype that is a path": ("w", ("w",), ("float32",), (3,), 0, 0, 0, 0, 0),
    "many dims": ("w", ("w",), "float32", (1,) * 100_000, 0, 0, 0, 0, 0),
    "a large size": ("w", ("w",), "float32", (1 << 100_000,), 0, 0, 0, 0, 0),
    "a size that is a list": ("w", ("w",), "float32", ([3],), 0, 0, 0, 0, 0),
    "sizes whose product is large": ("w", ("w",), "float32", (1 << 62,) * 64, 0, 0, 0, 0, 0),
    "many chunks": ("w", ("w",), "float32", (3,), 1 << 62, 0, 0, 0, 0),
    "chunks before the file": ("w", ("w",), "float32", (3,), 1, -1 << 40, 0, 0, 0),
    "a file that is not there": ("w", ("w",), None, 7, 0, 0),
    "a start that is a float": ("w", ("w",), None, 0, 0.5, 0),
    "a field more": ("w", ("w",), None, 0, 0, 0, 0),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_an_index(row: str, tmp_path: Path) -> None:
    for data in (pickle.dumps((("a",), [ROWS[row]])), pickle.dumps((("a",), [ROWS[row]] * 2))):
        (tmp_path / METADATA).write_bytes(with_index(data))
        refused(lambda: all_of(tmp_path))


@pytest.mark.parametrize("value", ["pairs", "deep", "long"])
def test_values_in_an_index(value: str, tmp_path: Path) -> None:
    for data in (
        VALUES[value] + b".",
        b"(" + VALUES[value] + b"]t.",
        b")](" + VALUES[value] + b"e\x86.",
        b")](" + VALUES[value] + b")NK\x00K\x00K\x00te\x86.",
        b")((" + VALUES[value] + b")NK\x00K\x00K\x00ttt.",
    ):
        (tmp_path / METADATA).write_bytes(with_index(b"\x80\x04" + data))
        refused(lambda: all_of(tmp_path))


# ---------------------------------------------------------------------- items and objects


def archive(pickled: bytes, method: int = zipfile.ZIP_STORED, more: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as target:
        for name, data in {"data.pkl": pickled, **more}.items():
            target.writestr(f"archive/{name}", data)
    return out.getvalue()


REBUILD = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x03tQ"


def item(
    storage: bytes = STORAGE, offset: bytes = b"K\x00", sizes: bytes = b"K\x03\x85", strides: bytes = b"K\x01\x85"
) -> bytes:
    rest = b"\x89ccollections\nOrderedDict\n)R"
    return archive(REBUILD + b"(" + storage + offset + sizes + strides + rest + b"tR.", more={"data/0": bytes(12)})


def read(data: bytes) -> Any:
    return read_item(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "file, tensor 'w'")


def test_an_item_like_this_is_read() -> None:
    assert read(item()).sizes == (3,)


@pytest.mark.parametrize("value", ["pairs", "deep", "long"])
def test_values_in_an_item(value: str) -> None:
    opcodes = VALUES[value]
    for data in (
        archive(b"\x80\x02" + opcodes + b"."),
        item(storage=opcodes),
        item(storage=opcodes + b"Q"),
        item(storage=b"(" + text("storage") + opcodes + text("0") + text("cpu") + b"K\x03tQ"),
        item(storage=b"(" + text("storage") + b"ctorch\nFloatStorage\n" + opcodes + text("cpu") + b"K\x03tQ"),
        item(offset=opcodes),
        item(sizes=opcodes),
        item(strides=opcodes),
        item(sizes=b"(" + b"K\x01" * 100_000 + b"t"),
        item(strides=b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85"),
        archive(b"\x80\x02}" + opcodes + b"Ns."),
    ):
        refused(lambda data=data: read(data))


OBJECTS: dict[str, bytes] = {
    "a key": archive(b"\x80\x02}" + PAIRS + b"Ns."),
    "an item of a set": archive(b"\x80\x02cbuiltins\nset\n](" + PAIRS + b"e\x85R."),
    "an item of a set in the protocol": archive(b"\x80\x04\x8f(" + PAIRS + b"\x90."),
    "a key of an OrderedDict": archive(b"\x80\x02ccollections\nOrderedDict\n]](" + PAIRS + b"Nea\x85R."),
    "lists of the same lists": archive(b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(60)) + b"."),
    "a large bytearray": archive(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + struct.pack("<q", 1 << 34)[:5] + b"\x85R."),
    "a compressed one": archive(b"\x80\x02(" + b"N" * 100_000_000 + b"t.", zipfile.ZIP_DEFLATED),
    "nothing": b"",
}


def opened(data: bytes) -> Archive:
    return Archive(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "file")


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects(kind: str) -> None:
    if kind == "lists of the same lists":
        check_archive(opened(OBJECTS[kind]), "file", is_copied=False)  # torch.load makes each of them once
        refused(lambda: check_archive(opened(OBJECTS[kind]), "file"))
    else:
        refused(lambda: decode(OBJECTS[kind], "file, object 'x'"))


def in_zip64(extra: bytes, signature: bytes = b"PK\6\6", gap: bytes = b"", nbytes: int = IN_EXTRA) -> bytes:
    """An archive with a Zip64 end, and of its record this size and these extra fields."""
    data = archive(b"\x80\x02N.")
    at = data.index(b"PK\1\2")
    fields = list(CENTRAL.unpack_from(data, at))
    name = data[at + CENTRAL.size :][: fields[10]]
    fields[9], fields[11] = nbytes, len(extra)
    directory = CENTRAL.pack(*fields) + name + extra
    last = END64.pack(signature, END64.size - 12, 45, 45, 0, 0, 1, 1, len(directory), at) + gap
    locator = LOCATOR.pack(b"PK\6\7", 0, at + len(directory), 1)
    return data[:at] + directory + last + locator + END.pack(b"PK\5\6", 0, 0, 1, 1, len(directory), at, 0)


def zip64(nbytes: int) -> bytes:
    return struct.pack("<2HQ", 1, 8, nbytes)


def test_what_readers_of_zip_archives_take_for_different_things() -> None:
    """torch.load takes the first of two Zip64 fields, and the plain end if the other one has no signature."""
    assert opened(in_zip64(zip64(4))).records["archive/data.pkl"].nbytes == 4
    for data in (
        in_zip64(zip64(4) + zip64(3)),
        in_zip64(zip64(4)[:-1]),
        in_zip64(b""),
        in_zip64(zip64(4), signature=b"PK\6\0"),
        in_zip64(zip64(4), gap=bytes(8)),
    ):
        assert "Zip64" in refused(lambda data=data: opened(data))


def test_records_on_top_of_each_other() -> None:
    """Each of them all of the bytes, so that their checksums take for ever."""
    data = bytearray(archive(b"\x80\x02N.", more={"large": bytes(1_000_000)}))
    directory = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    entry = data[directory : data.index(b"PK\5\6")]
    end = bytearray(data[data.index(b"PK\5\6") :])
    count = 1000
    struct.pack_into("<2HI", end, 8, count + 1, count + 1, struct.unpack_from("<I", end, 12)[0] + (count - 1) * len(entry))
    refused(lambda: decode(bytes(data[:directory] + entry * count + end), "file, object 'x'"))


@pytest.mark.parametrize(
    "value",
    [
        {1: 2, (1, ("a", 2)): "x", None: 3.5},
        {"s": {1, (2, 3)}},
        [torch.ones(2)] * 1000,
        bytearray(b"abc"),
        1 << 2000,
        "é" * 9000,
        [list(range(5000))] * 5000,
    ],
    ids=["keys", "set", "shared", "bytearray", "number", "string", "rows"],
)
def test_objects_that_are_saved(value: object) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    decode(buffer.getvalue(), "file, object 'x'")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n" * 5000: 1}, "in the place of a name"),
        ({".".join("n" * 300): 1}, "in the place of a name"),
        ({"x": {(1,) * 2000: 2}}, "would not load"),
        ({"x": {1 << 5000: 2}}, "would not load"),
    ],
    ids=["name", "dots", "tuple", "number"],
)
def test_what_would_be_refused_is_not_saved(state: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, ValueError), match=message):
        entries(state)


def test_files_of_torch_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, data in OBJECTS.items():
        (tmp_path / "saved.pt").write_bytes(data)
        assert main(["inspect", str(tmp_path / "saved.pt")]) == 1, kind
        assert len(capsys.readouterr().err) < LONGEST


def test_a_long_name_in_a_file_of_torch_save(tmp_path: Path) -> None:
    torch.save({"state." * 50_000 + "\n": torch.ones(())}, tmp_path / "saved.pt")
    assert main(["inspect", str(tmp_path / "saved.pt")]) == 0


# ---------------------------------------------------------------------- safetensors


def safetensors(entry: str, name: str = "w", data: bytes = b"") -> bytes:
    header = f"{{{json.dumps(name)}: {entry}}}".encode()
    return len(header).to_bytes(8, "little") + header + data


HEADERS: dict[str, bytes] = {
    "20,000 dims": safetensors(f'{{"dtype": "F32", "shape": {[1] * 20_000}, "data_offsets": [0, 4]}}', data=bytes(4)),
    "100,000 dims": safetensors(f'{{"dtype": "F32", "shape": {[1 << 62] * 100_000}, "data_offsets": [0, 4]}}', data=bytes(4)),
    "a large product": safetensors(f'{{"dtype": "F32", "shape": {[1 << 62] * 60}, "data_offsets": [0, 4]}}', data=bytes(4)),
    "a large empty one": safetensors(f'{{"dtype": "F32", "shape": {[1 << 62, 1 << 62, 0]}, "data_offsets": [0, 0]}}'),
    "many digits": safetensors(f'{{"dtype": "F32", "shape": [{"1" * 100_000}], "data_offsets": [0, 4]}}'),
    "digits": safetensors(f'{{"dtype": "F32", "shape": [{"1" * 4_000}], "data_offsets": [0, 4]}}'),
    "deep": safetensors("[" * 100_000 + "]" * 100_000),
    "a long dtype": safetensors(f'{{"dtype": "{"x" * 100_000}", "shape": [1], "data_offsets": [0, 4]}}'),
    "a long name": safetensors('{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}', "n" * 100_000, bytes(4)),
    "a long metadata": safetensors(f"[{'1,' * 100_000} 1]", "__metadata__"),
    "not JSON": safetensors("?" * 100_000),
    "terminal": safetensors('{"dtype": "?", "shape": [1], "data_offsets": [0, 4]}', "\x1b[2J\n", bytes(4)),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_safetensors(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[kind])
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert refused(lambda path=path: read_arrays(path)).isprintable()


def test_many_tiny_tensors_are_read(tmp_path: Path) -> None:
    names = [f"w{n}" for n in range(20_000)]
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    ).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20_000))
    assert [*read_arrays(tmp_path / "a.safetensors")] == names


def test_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO, of which nobody writes the other end."""
    for name in ("model.safetensors", METADATA, "model.safetensors.index.json"):
        folder = tmp_path / name
        folder.mkdir()
        os.mkfifo(folder / name)
        assert "is no regular file" in refused(lambda folder=folder: read_stored(folder)) or name != METADATA
    refused(lambda: read_arrays(tmp_path / "model.safetensors"))
    refused(lambda: read_arrays(tmp_path / "model.safetensors" / "model.safetensors"))
    refused(lambda: read_arrays(tmp_path / "model.safetensors.index.json"))


# ---------------------------------------------------------------------- dumps of the flight recorder


@pytest.mark.parametrize("part", ["[],", "{},", '"abc",', "1.5,", "[[[[", "123456789012345678901234567890", '"'])
def test_large_dumps(part: str, tmp_path: Path) -> None:
    head = '{"rank": 0, "size": 1, "job": "j", "time": 1.0, "notes": [], "calls": ['
    (tmp_path / "a.json").write_text(head + part * (50_000_000 // len(part)))
    refused(lambda: merge_dumps.load(tmp_path / "a.json"), ValueError)


def test_a_dump_of_many_ranks_is_read(tmp_path: Path) -> None:
    """Its calls have the numbers of all of them."""
    call = {"comm": "dp", "ranks": list(range(5000)), "number": 1, "what": "x", "started": 1.0, "ended": 0.0}
    dump = {"rank": 3, "size": 5000, "job": "j", "time": 1.0, "notes": [], "calls": [call] * 1000}
    (tmp_path / "a.json").write_text(json.dumps(dump))
    found = merge_dumps.load(tmp_path / "a.json")
    assert found.calls[999].ranks == tuple(range(5000))
    assert "'dp' of ranks 0 to 4999: rank 3 is at #1 x, under way" in merge_dumps.merge([found])
