"""The bytes of checkpoints, without ranks: items beside torch.save, metadata beside torch's DCP; damaged and evil files."""

import copyreg
import io
import os
import pickle
import random
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import refused
from shardrt.checkpoint import CheckpointError, DamagedCheckpointError
from shardrt.checkpoint.disk.files import METADATA, bytes_of
from shardrt.checkpoint.formats.dcp import metadata_reader
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.dcp.metadata_writer import INDEX_KEY, MetadataWriter, ending
from shardrt.checkpoint.formats.dcp.metadata_writer import Path as Keys
from shardrt.checkpoint.formats.stored import Columns, Stored
from shardrt.checkpoint.formats.torch_file.items import (
    BLOCK,
    BlockCrcs,
    combined_crc,
    header_length,
    item_footer,
    item_header,
    item_length,
    without_gaps,
)
from shardrt.checkpoint.formats.torch_file.stored_items import read_item
from shardrt.checkpoint.state.objects import decode
from shardrt.tensor.placement.placement import Box

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex128,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return bytes(bytes_of(copy)) if tensor.numel() else b""


def as_lies(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.as_strided((tensor.numel(),), (1,)))


def item_of(tensor: torch.Tensor) -> bytes:
    tensor, crcs = without_gaps(tensor), BlockCrcs()
    memory = as_lies(tensor) if tensor.numel() else b""
    crcs.update(memory)
    geometry = tensor.dtype, tensor.shape, tensor.stride()
    return item_header(*geometry) + memory + item_footer(*geometry, crcs.values)


def saved(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def elements_of(item: bytes) -> torch.Tensor:
    """The tensor of an item, by `read_item`, which may read only from inside of it."""

    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(item)
        return item[offset : offset + nbytes]

    found = read_item(read, len(item), "file.distcp: tensor 'w'")
    data = item[found.data_start : found.data_start + found.data_nbytes]
    assert zlib.crc32(data) == found.crc
    if found.crcs_start is not None:
        blocks = b"".join(zlib.crc32(data[at : at + BLOCK]).to_bytes(4, "little") for at in range(0, len(data), BLOCK))
        assert item[found.crcs_start : found.crcs_start + len(blocks)] == blocks
    if not torch.Size(found.sizes).numel():
        return torch.empty(found.sizes, dtype=found.dtype)
    first = (found.start - found.data_start) // found.dtype.itemsize
    return torch.frombuffer(bytearray(data), dtype=found.dtype).as_strided(found.sizes, found.strides, first)


def tensors(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """0-dim, empty, with other dims outermost, with gaps, and of more than one block."""
    yield random_bits((), dtype)
    yield random_bits((0, 3), dtype)
    yield random_bits((1, 1, 1), dtype)
    yield random_bits((4, 3, 5), dtype).movedim(0, 1)
    yield random_bits((3, 5), dtype).t()
    yield random_bits((4, 6), dtype)[1:3, 2:5]
    yield random_bits((3,), dtype).expand(2, 3)
    yield random_bits((2 * BLOCK // dtype.itemsize + 3,), dtype)


class TestItems:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_torch_reads_ours_and_we_read_both(self, dtype: torch.dtype) -> None:
        for tensor in tensors(dtype):
            item, lies = item_of(tensor), without_gaps(tensor)
            nbytes = tensor.numel() * dtype.itemsize
            assert len(item) == item_length(dtype, tensor.dim(), nbytes)
            assert item_length(dtype, tensor.dim(), torch.tensor([nbytes])).item() == len(item)
            assert header_length(dtype, tensor.dim()) % 64 == 0
            loaded = torch.load(io.BytesIO(item), weights_only=True)
            assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, lies.stride())
            for found in (loaded, elements_of(item), elements_of(saved(tensor))):
                assert (found.dtype, found.shape, bits(found)) == (dtype, tensor.shape, bits(tensor))

    def test_tensors_without_gaps_are_not_copied(self) -> None:
        whole = torch.arange(24.0).view(4, 6)
        for dense in (whole, whole.t(), whole[1:3], whole[2], whole[1:2, 2:4], whole.view(2, 2, 6).movedim(2, 0)):
            assert without_gaps(dense).data_ptr() == dense.data_ptr()
            assert without_gaps(dense).stride() == dense.stride()
        assert without_gaps(whole[:, 1:]).is_contiguous()
        assert bits(without_gaps(torch.view_as_complex(whole.view(12, 2)).conj())) != bits(whole)

    def test_the_archive_is_sound_and_torch_maps_it(self, tmp_path: Path) -> None:
        tensor = torch.randn(300, 77)
        (tmp_path / "item").write_bytes(item_of(tensor))
        with zipfile.ZipFile(tmp_path / "item") as archive:
            assert archive.testzip() is None
            assert zlib.crc32(bits(tensor)) == archive.getinfo("archive/data/0").CRC
        assert torch.equal(torch.load(tmp_path / "item", mmap=True), tensor)

    @pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 77])
    def test_checksums_of_pieces(self, nbytes: int) -> None:
        data, crcs, at = random.Random(nbytes).randbytes(nbytes), BlockCrcs(), 0
        for size in (5, BLOCK, 1, 2 * BLOCK, nbytes):
            crcs.update(data[at : at + size])
            at += size
        assert list(crcs.values) == [zlib.crc32(data[at : at + BLOCK]) for at in range(0, nbytes, BLOCK)]
        assert combined_crc(crcs.values, nbytes) == zlib.crc32(data)

    def test_items_of_torch_save(self) -> None:
        whole = torch.arange(1000.0).view(10, 100)
        for tensor in (whole, whole[2:5, 3:50], whole[3], whole.t(), whole[5, 5]):
            assert torch.equal(elements_of(saved(tensor)), tensor)
        assert torch.equal(elements_of(saved(torch.nn.Parameter(whole))), whole)

    def test_damaged_items_are_refused(self) -> None:
        for item in (item_of(torch.arange(5000)), saved(torch.arange(5000))):
            for end in (*range(0, len(item) - 1, 997), *range(len(item) - 200, len(item) - 1, 7)):
                with pytest.raises(CheckpointError, match="tensor 'w'"):
                    elements_of(item[:end])
            draw = random.Random(0)
            for _ in range(1000):
                at = draw.choice([draw.randrange(450), draw.randrange(len(item) - 450, len(item))])
                torn = item[:at] + bytes([item[at] ^ (1 << draw.randrange(8))]) + item[at + 1 :]
                try:
                    found = elements_of(torn)
                except (CheckpointError, AssertionError):  # refused, or a checksum that does not match
                    continue
                assert found.dtype == torch.int64
                assert found.tolist() == list(range(5000))

    def test_other_archives_are_refused_by_name(self) -> None:
        item = saved(torch.arange(5))
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        encrypted = bytearray(item)
        at = item.rindex(b"PK\1\2", 0, item.index(b"archive/data/0", item.index(b"PK\1\2")))
        encrypted[at + 8] |= 1
        for data, message in (
            (packed.getvalue(), "compressed"),
            (bytes(encrypted), "encrypted"),
            (saved({"a": 1}), "expected a tensor"),
            (saved(torch.ones(2), _use_new_zipfile_serialization=False), "no zip archive"),
            (b"", "no zip archive"),
        ):
            with pytest.raises(CheckpointError, match=message):
                elements_of(data)

    def test_a_header_that_is_damaged_is_damage(self) -> None:
        """So that a run goes on from an older checkpoint."""
        item = saved({"a": 1})
        for at in (8, 10):  # flags and method
            damaged = bytearray(item)
            damaged[item.rindex(b"PK\1\2", 0, item.rindex(b"data.pkl")) + at] ^= 1
            with pytest.raises(DamagedCheckpointError, match=r"is (encrypted|compressed)"):
                decode(bytes(damaged), "file, object 'a'")


# ---------------------------------------------------------------------- metadata


class Folder:
    """A checkpoint of whole tensors and objects that one process writes with our functions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, bytearray()
        folder.mkdir()
        self._metadata = io.BytesIO()
        self._writer = MetadataWriter(self._metadata, ["unused.distcp", "__0_0.distcp"])

    def add(self, name: str, path: Keys, tensor: torch.Tensor, chunks: int = 1) -> None:
        """In chunks of rows, or of one chunk."""
        rows = []
        for start, part in enumerate(tensor.split(1) if chunks > 1 else [tensor]):
            offsets = (start, *[0] * (tensor.dim() - 1)) if tensor.dim() else ()
            rows.append((*offsets, *part.shape, 1, *self._append(item_of(part))))
        columns = torch.tensor(rows, dtype=torch.int64)
        dims = tensor.dim()
        self._writer.add_tensor(
            name, path, tensor.dtype, tensor.shape, Columns(columns[:, :dims], columns[:, dims : 2 * dims], *columns.T[-3:])
        )

    def add_object(self, name: str, path: Keys, value: object) -> None:
        self._writer.add_object(name, path, 1, *self._append(saved(value)))

    def finish(self) -> None:
        self._writer.finish()
        (self.folder / METADATA).write_bytes(self._metadata.getvalue() + ending(SAVE_ID))
        (self.folder / "__0_0.distcp").write_bytes(self.data)

    def _append(self, item: bytes) -> tuple[int, int]:
        self.data += bytes(-len(self.data) % 64)
        start = len(self.data)
        self.data += item
        return start, len(item)


SAVE_ID = "0123456789abcdef" * 2
STATE: dict[str, Any] = {
    "model": {
        "w": torch.arange(15.0).view(5, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "deep": torch.arange(2 * 3 * 2 * 2 * 3.0).view(2, 3, 2, 2, 3).to(torch.bfloat16),
        "bits": torch.tensor([True, False, True]),
    },
    "steps": [7, torch.ones(2)],
    "naïve": "✓",
}


def ours(folder: Path) -> Path:
    made = Folder(folder)
    for name, tensor in STATE["model"].items():
        made.add(f"model.{name}", ("model", name), tensor, chunks=5 if name in ("w", "deep") else 1)
    made.add_object("steps.0", ("steps", 0), 7)
    made.add("steps.1", ("steps", 1), STATE["steps"][1])
    made.add_object("naïve", ("naïve",), "✓")
    made.finish()
    return folder


def stock(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(STATE, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module", params=[ours, stock], ids=["ours", "torch"])
def written(request: Any, tmp_path_factory: Any) -> Path:
    return request.param(tmp_path_factory.mktemp("checkpoints") / "one")


def assert_same(stored: Stored, other: Any) -> None:
    """What we read is what torch reads."""
    assert sorted([*stored.tensors, *stored.objects]) == sorted(other.state_dict_metadata)
    assert stored.paths == other.planner_data
    assert stored.save_id == other.storage_meta.save_id
    for name, expected in other.state_dict_metadata.items():
        if isinstance(expected, BytesStorageMetadata):
            info = other.storage_data[MetadataIndex(name)]
            assert stored.objects[name] == (info.relative_path, info.offset, info.length)
            continue
        found = stored.tensors[name]
        assert (found.shape, found.dtype) == (tuple(expected.size), expected.properties.dtype)
        assert len(found.chunks) == len(expected.chunks)
        for chunk, box in zip(found.chunks, expected.chunks, strict=True):
            info = other.storage_data[MetadataIndex(name, box.offsets)]
            assert chunk == ((tuple(box.offsets), tuple(box.sizes)), info.relative_path, info.offset, info.length)


class TestMetadata:
    def test_reads_what_torch_reads(self, written: Path) -> None:
        assert_same(read_stored(written), FileSystemReader(written).read_metadata())
        assert read_stored(str(written)).paths["steps.0"] == ("steps", 0)

    def test_items_are_where_it_says(self, written: Path) -> None:
        stored = read_stored(written)
        for name, expected in {
            **{f"model.{key}": value for key, value in STATE["model"].items()},
            "steps.1": torch.ones(2),
        }.items():
            found = torch.empty_like(expected)
            for (offsets, sizes), file, start, length in stored.tensors[name].chunks:
                part = found
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                part.copy_(elements_of((written / file).read_bytes()[start : start + length]))
            assert torch.equal(found, expected)
        for name, value in (("steps.0", 7), ("naïve", "✓")):
            file, start, length = stored.objects[name]
            assert torch.load(io.BytesIO((written / file).read_bytes()[start : start + length])) == value

    def test_torch_loads_it(self, written: Path) -> None:
        state: dict[str, Any] = {
            "model": {name: torch.zeros_like(value) for name, value in STATE["model"].items()},
            "steps": [0, torch.zeros(2)],
            "naïve": "",
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, checkpoint_id=written, no_dist=True)
        for name, expected in STATE["model"].items():
            assert torch.equal(state["model"][name], expected)
        assert (state["steps"][0], state["naïve"]) == (7, "✓")
        assert torch.equal(state["steps"][1], STATE["steps"][1])

    def test_overlapping_chunks(self, tmp_path: Path) -> None:
        stored = read_stored(ours(tmp_path / "one")).tensors
        assert [chunk.box.offsets for chunk in stored["model.w"].overlapping(Box((1, 2), (2, 1)))] == [(1, 0), (2, 0)]
        assert stored["model.w"].overlapping(Box((1, 3), (2, 1))) == []
        assert len(stored["model.scalar"].overlapping(Box((), ()))) == 1

    def test_sizes_above_32_bits(self, tmp_path: Path) -> None:
        out, shape, start = io.BytesIO(), (1 << 33, 3), 1 << 40
        writer = MetadataWriter(out, ["a"])
        rows = torch.tensor([[0, 0, 1 << 32, 3, 0, start, 9], [1 << 32, 0, 1 << 32, 3, 0, start + 9, 9]])
        writer.add_tensor("w", ("w",), torch.int8, shape, Columns(rows[:, :2], rows[:, 2:4], *rows.T[4:]))
        writer.finish()
        (tmp_path / METADATA).write_bytes(out.getvalue() + ending(SAVE_ID))
        assert_same(read_stored(tmp_path), FileSystemReader(tmp_path).read_metadata())
        assert read_stored(tmp_path).tensors["w"].chunks[1] == (((1 << 32, 0), (1 << 32, 3)), "a", start + 9, 9)

    def test_cut_off(self, written: Path, tmp_path: Path) -> None:
        data = (written / METADATA).read_bytes()
        for end in (*range(0, len(data), 31), len(data) - 1):
            (tmp_path / METADATA).write_bytes(data[:end])
            refused(METADATA, lambda: read_stored(tmp_path), CheckpointError)

    def test_a_flipped_bit_of_ours_is_found(self, tmp_path: Path) -> None:
        """Or it is in what is read by others only."""
        folder = ours(tmp_path / "one")
        data, expected = (folder / METADATA).read_bytes(), read_stored(folder)
        everything = {name: tensor.chunks for name, tensor in expected.tensors.items()}
        for at in range(0, len(data), 17):
            (folder / METADATA).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            try:
                found = read_stored(folder)
                assert {name: tensor.chunks for name, tensor in found.tensors.items()} == everything
                assert (found.objects, found.paths) == (expected.objects, expected.paths)
            except CheckpointError:
                continue
        row = data.index(b"h\x00)\x81}(h\x01") + 20
        (folder / METADATA).write_bytes(data[:row] + bytes([data[row] ^ 1]) + data[row + 1 :])
        with pytest.raises(CheckpointError, match=r"chunks of tensor 'model\.w'.*damaged"):
            read_stored(folder).tensors["model.w"]

    def test_a_flipped_bit_of_others_raises_nothing_else(self, tmp_path: Path) -> None:
        folder, draw = stock(tmp_path / "one"), random.Random(0)
        data = (folder / METADATA).read_bytes()
        for _ in range(400):
            at = draw.randrange(len(data))
            (folder / METADATA).write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :])
            with suppress(CheckpointError):
                found = read_stored(folder)
                for values in (found.tensors, found.objects):
                    for name in values:
                        with suppress(CheckpointError):
                            assert values[name] is not None

    def test_large_metadata_is_read_in_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata_reader, "SMALL", 0)
        folder = ours(tmp_path / "one")
        assert_same(read_stored(folder), FileSystemReader(folder).read_metadata())
        stored = read_stored(folder)
        with open(folder / METADATA, "r+b") as file:
            file.truncate(500)
        with pytest.raises(CheckpointError, match=r"found .* before its end"):
            assert stored.tensors["steps.1"]

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        refused(r"\.metadata.*No such file", lambda: read_stored(tmp_path / "none"), CheckpointError)

    def test_files_outside_of_the_folder_are_refused(self, tmp_path: Path) -> None:
        for number, file in enumerate(("/etc/passwd", "../x", "a/../../x")):
            for keep_index in (True, False):
                folder = tmp_path / f"{number}{keep_index}"
                folder.mkdir()
                out = io.BytesIO()
                writer = MetadataWriter(out, [file])
                writer.add_object("a", ("a",), 0, 0, 1)
                writer.finish()
                data = out.getvalue() + ending(SAVE_ID)
                data = data if keep_index else without_index(data)
                (folder / METADATA).write_bytes(data)
                with pytest.raises(CheckpointError, match="expected one in the checkpoint's folder"):
                    read_stored(folder).objects["a"]

    def test_ours_without_its_index(self, tmp_path: Path) -> None:
        """The pickle says the same as the index."""
        folder = ours(tmp_path / "one")
        expected = read_stored(folder)
        (folder / METADATA).write_bytes(without_index((folder / METADATA).read_bytes()))
        found = read_stored(folder)
        assert (dict(found.objects), found.paths, found.save_id) == (dict(expected.objects), expected.paths, expected.save_id)
        for name, tensor in expected.tensors.items():
            assert found.tensors[name].chunks == tensor.chunks


def without_index(data: bytes) -> bytes:
    """A `.metadata` of ours as torch would write it again."""
    found = pickle.loads(data)
    del found.__dict__[INDEX_KEY]
    return pickle.dumps(found)


def test_a_list_with_empty_items_is_read(tmp_path: Path) -> None:
    """Stock torch stores no name for an empty dict, so that an index may be larger than the number of names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"a": [{}, {}, {}, torch.ones(2), {}, torch.ones(3)]}, checkpoint_id=tmp_path, no_dist=True)
    assert read_stored(tmp_path).paths == {"a.3": ("a", 3), "a.5": ("a", 5)}


# ---------------------------------------------------------------------- evil pickles


class Evil:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def in_planner_data(value: object, tmp_path: Path) -> bytes:
    folder = stock(tmp_path / "good")
    found = pickle.loads((folder / METADATA).read_bytes())
    assert any(isinstance(entry, TensorStorageMetadata) for entry in found.state_dict_metadata.values())
    found.planner_data = {"a": ("b", value)}
    return pickle.dumps(found)


TOUCH = "touch evil-was-here"
CLASSES = b"torch.distributed.checkpoint.metadata"


class TestEvilPickles:
    @pytest.mark.parametrize(
        ("data", "name"),
        [
            (b"cos\nsystem\n(S'%b'\ntR." % TOUCH.encode(), "os.system"),
            (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x13%b\x85R." % TOUCH.encode(), "os.system"),
            (pickle.dumps(Evil(eval, f"__import__('os').system('{TOUCH}')")), "builtins.eval"),
            (pickle.dumps(Evil(os.system, TOUCH), 0), "posix.system"),
            (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
            (b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.", "torch.Size.__init__"),
            (b"ctorch\nload\n.", "torch.load"),
            (b"ctorch\n_dynamo\n.", "torch._dynamo"),
            (b"(S'%b'\nios\nsystem\n." % TOUCH.encode(), "os.system"),
            (b"Pan-id\n.", "persistent object"),
            (b"\x80\x02X\x02\x00\x00\x00idQ.", "persistent object"),
            (b"\x80\x02\x82\xf0.", "extension"),
            (b"\x80\x02\x84\xf0\x00\x00\x00.", "extension"),
            # Attributes of the class that stands for a global.
            (b"\x80\x02c%b\nMetadata\nN}X\x01\x00\x00\x00xK\x01s\x86b." % CLASSES, "may not change classes"),
            (b"\x80\x02cpathlib\nPosixPath\nN}X\x01\x00\x00\x00xK\x01s\x86b.", "may not change classes"),
            (b"\x80\x02c%b\nMetadata\n}X\x01\x00\x00\x00xK\x01sb." % CLASSES, "may not change classes"),
            # Sizes and memo places for which Python's other unpickler allocates gigabytes.
            (b"\x80\x04Nr\xff\xff\xff\xff.", "found NoneType"),
            (b"Np4294967295\n.", "found NoneType"),
            (b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.", "not a pickle that can be read"),
            (b"\x80\x04\x8e\x00\x00\x00\x00\x10\x00\x00\x00.", "not a pickle that can be read"),
            (pickle.dumps([1, 2]), "expected the metadata of a checkpoint, found list"),
            (b"\x80\x04N.", "found NoneType"),
        ],
    )
    @pytest.mark.parametrize("registered", [False, True])
    def test_refused_by_name(
        self, data: bytes, name: str, registered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / METADATA).write_bytes(data)
        if registered:
            copyreg.add_extension("os", "system", 240)
            pickle.loads(b"\x80\x02\x82\xf0.")  # now the unpickler has it in its cache
        try:
            with pytest.raises(CheckpointError, match=name) as caught:
                read_stored(tmp_path)
        finally:
            if registered:
                copyreg.remove_extension("os", "system", 240)
                copyreg.clear_extension_cache()
        assert METADATA in str(caught.value)
        assert os.listdir(tmp_path) == [METADATA]

    def test_inside_of_metadata(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / METADATA).write_bytes(in_planner_data(Evil(os.system, TOUCH), tmp_path))
        refused(r"posix\.system", lambda: read_stored(tmp_path), CheckpointError)
        assert sorted(os.listdir(tmp_path)) == [METADATA, "good"]

    def test_inside_of_an_item(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for value in (Evil(os.system, TOUCH), [torch.ones(2), Evil(eval, "1")], Evil(getattr, "x", "upper")):
            with pytest.raises(CheckpointError, match=r"data\.pkl.*(posix\.system|(builtins|__builtin__)\.(eval|getattr))"):
                elements_of(saved(value))
        assert not os.listdir(tmp_path)
