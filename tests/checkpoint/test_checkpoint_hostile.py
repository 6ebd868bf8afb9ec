"""Objects of a megabyte that would unpack to a gigabyte, and names that a terminal would act on."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import zipfile
from collections import Counter, OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks, refused
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, load, save
from shardrt.checkpoint.__main__ import main
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.torch_file.archive import Archive
from shardrt.checkpoint.formats.torch_file.expansion import check_archive
from shardrt.checkpoint.state.objects import decode, encode
from shardrt.comm import World

LARGE = 1 << 30


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def called(module: str, name: str, *args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"tR"


def made(module: str, name: str, *args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"t\x81"


def storage(kind: str, numel: int, module: str = "torch") -> bytes:
    return b"(" + text("storage") + f"c{module}\n{kind}\n".encode() + text("0") + text("cpu") + number(numel) + b"tQ"


def tensor(storage: bytes, sizes: bytes, strides: bytes) -> bytes:
    rest = b"\x89" + called("collections", "OrderedDict")
    return called("torch._utils", "_rebuild_tensor_v2", storage, b"K\x00", sizes, strides, rest)


def archive(pickled: bytes, data: bytes = b"", compression: int = zipfile.ZIP_STORED, more: bytes = b"") -> bytes:
    """What torch.save writes, of this pickle and one storage."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/data/0", data)
        file.writestr("archive/version", b"3\n")
        if more:
            file.writestr("archive/data/1", more)
    return out.getvalue()


def hex_digits(times: int) -> bytes:
    """Twice as many characters each time."""
    found = text("x" * 500_000)
    for _ in range(times):
        found = called("_codecs", "encode", called("_codecs", "encode", found, text("latin1")), text("hex"))
    return found


ONE = number(1) + b"\x85"
EXPANDED = tensor(storage("FloatStorage", 1), number(LARGE // 4) + b"\x85", b"K\x00\x85")


def laughs(begin: bytes, refer: bytes) -> bytes:
    """The same container twice in another one, 27 times."""
    found = begin + b"q\x00"
    for place in range(1, 28):
        found += begin + bytes([ord("q"), place]) + refer.replace(b"?", b"h" + bytes([place - 1]))
    return found


HOSTILE = {
    "lists of lists": archive(text("numpy.ndarray") + laughs(b"]", b"(??e") + b"\x86"),
    "dicts of dicts": archive(text("numpy.ndarray") + laughs(b"}", b"(X\1\0\0\0a?X\1\0\0\0b?u") + b"\x86"),
    "a list in itself": archive(text("numpy.ndarray") + b"]q\x00(h\x00e\x86"),
    "compressed": archive(tensor(storage("FloatStorage", LARGE // 4), number(LARGE // 4) + b"\x85", ONE), bytes(LARGE // 8), 8),
    "compressed and unused": archive(b"N", bytes(LARGE // 8), zipfile.ZIP_DEFLATED),
    "bytearray": archive(called("builtins", "bytearray", number(LARGE))),
    "new bytearray": archive(made("builtins", "bytearray", number(LARGE))),
    "storage": archive(called("torch", "FloatStorage", number(LARGE // 4))),
    "new storage": archive(made("torch.storage", "UntypedStorage", number(LARGE))),
    "typed storage": archive(called("torch.storage", "TypedStorage", number(LARGE))),
    "tensor": archive(called("torch", "FloatTensor", number(LARGE // 4))),
    "new tensor": archive(made("torch", "Tensor", number(1 << 14), number(1 << 14))),
    "by type": archive(
        called(
            "torch._tensor",
            "_rebuild_from_type_v2",
            b"cbuiltins\nbytearray\n",
            b"ctorch\nTensor\n",
            number(LARGE) + b"\x85",
            b"N",
        )
    ),
    "hex": archive(hex_digits(11)),
    "storage of more than there is": archive(tensor(storage("FloatStorage", LARGE // 4), ONE, ONE), bytes(4)),
    "untyped storage of more than there is": archive(
        tensor(storage("UntypedStorage", LARGE, "torch.storage"), ONE, ONE), bytes(4)
    ),
    "storage of less than nothing": archive(tensor(storage("FloatStorage", -5), ONE, ONE), bytes(4)),
    "missing storage": archive(tensor(storage("FloatStorage", 1).replace(text("0"), text("7")), ONE, ONE), bytes(4)),
    "quantised": archive(
        called(
            "torch._utils",
            "_rebuild_qtensor",
            storage("QInt8Storage", 4),
            b"K\x00",
            number(LARGE) + b"\x85",
            ONE,
            b"(ctorch\nper_tensor_affine\n" + b"G?\xf0\x00\x00\x00\x00\x00\x00" + b"K\x00t",
            b"\x89",
            b"N",
        ),
        bytes(4),
    ),
    "expanded, and copied": archive(
        called("torch._utils", "_rebuild_device_tensor_from_cpu_tensor", EXPANDED, b"ctorch\nfloat64\n", text("cpu"), b"\x89"),
        bytes(4),
    ),
    "another global": archive(called("builtins", "range", number(LARGE))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_small_objects_that_would_be_large(kind: str) -> None:
    data = HOSTILE[kind]
    assert len(data) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(r"^file, object 'x'", lambda: decode(data, "file, object 'x'"), CheckpointError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KiB


@pytest.mark.parametrize("numel", [4000, 6000])
def test_an_expanded_tensor_counts_with_its_largest_elements(numel: int) -> None:
    """So small a file may make 65,536 bytes: fewer than 6,000 elements of 16 bytes have."""
    expanded = tensor(storage("ComplexDoubleStorage", 1), number(numel) + b"\x85", b"K\x00\x85")
    data = archive(called("torch._utils", "_rebuild_nested_tensor", expanded), bytes(16))
    opened = Archive(lambda start, nbytes: data[start : start + nbytes], len(data), "file")
    with pytest.raises(CheckpointError, match="far more bytes") if numel == 6000 else nullcontext():
        check_archive(opened, "file")


def test_records_on_top_of_each_other() -> None:
    data = bytearray(archive(b"N", more=bytes(400_000)))
    for place in (i for i in range(len(data) - 4) if data[i : i + 4] == b"PK\1\2"):
        if data[place + 46 :].startswith(b"archive/data/0"):  # takes the other's size and place
            other = data.rindex(b"PK\1\2")
            data[place + 16 : place + 28], data[place + 42 : place + 46] = (
                data[other + 16 : other + 28],
                data[other + 42 : other + 46],
            )
    refused("overlap", lambda: decode(bytes(data), "file, object 'x'"), CheckpointError)


class Vouched:
    """A class of the program's, for which it vouches."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vouched) and self.value == other.value

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    "value",
    [
        None,
        {0: [1, (2.5, "x")], (1, 2): {3}},
        {0: [[0] * 100] * 10_000},
        b"bytes \xff",
        bytearray(b"abc"),
        bytearray(),
        Counter({1: 2}),
        OrderedDict(b=1, a=2),
        (1 + 2j, torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cpu"), torch.strided, 2**200),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_are_none_of_these(value: object) -> None:
    assert decode(encode("x", value), "x") == value


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_none_of_these() -> None:
    base = torch.arange(12.0)
    shared = base[:3]
    param = torch.nn.Parameter(torch.ones(2))
    param.note = "kept"
    values = [
        shared, base.view(3, 4).t(), torch.ones(1).expand(1000), torch.empty(0), torch.ones(2, dtype=torch.bfloat16),
        torch.tensor(3), torch.randn(2, dtype=torch.complex64).conj(), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(5), 0.1, 3, torch.qint8), torch.ones(2, device="meta"), param,
        torch.ones(3, dtype=torch.uint16), torch.ones(2, requires_grad=True),
    ]  # fmt: skip
    found = decode(encode("x", {0: tuple(values)}), "x")[0]
    for value, each in zip(values, found, strict=True):
        assert (each.dtype, each.shape, each.layout, type(each)) == (value.dtype, value.shape, value.layout, type(value))
        if value.layout == torch.strided and not value.is_meta:
            assert torch.equal(
                each.dequantize() if each.is_quantized else each, value.dequantize() if value.is_quantized else value
            )
    with torch.serialization.safe_globals([Vouched]):
        vouched = {0: Vouched([1]), 1: Vouched({"a": torch.ones(1)})}
        assert decode(encode("x", vouched), "x")[0] == vouched[0]
    refused(r"'x' has a test_checkpoint_hostile\.Vouched at \[0\]", lambda: encode("x", vouched), CheckpointError)


@on_ranks(1)
def test_a_hostile_object_in_a_checkpoint(world: World, tmp_path: Path) -> None:
    save(tmp_path / "saved", {"x": "y" * 2000, "z": 1})
    stored = read_stored(tmp_path / "saved").objects["x"]
    data = (tmp_path / "saved" / stored.file).read_bytes()
    hostile = HOSTILE["bytearray"]
    program = called("builtins", "bytearray", number(LARGE))
    filled = archive(program, more=bytes(stored.length - len(archive(program, more=b"\0")) + 1))
    assert len(filled) == stored.length
    (tmp_path / "saved" / stored.file).write_bytes(data[: stored.offset] + filled + data[stored.offset + stored.length :])
    refused(r"__0_0.distcp', object 'x'.*bytearray", lambda: load(tmp_path / "saved", {"x": ""}), CheckpointError)
    load(tmp_path / "saved", {"z": 0})
    torch.save({"a": torch.ones(2)}, tmp_path / "fine.pt")
    assert main(["inspect", str(tmp_path / "fine.pt")]) == 0
    for data in (hostile, archive(laughs(b"}", b"(X\1\0\0\0a?X\1\0\0\0b?u"))):
        (tmp_path / "bad.pt").write_bytes(data)
        assert main(["inspect", str(tmp_path / "bad.pt")]) == 1


# ---------------------------------------------------------------------- names

CLEARS = "\x1b[2Jmodel\x1b]0;title\x07\r\n\u202eweights"


def test_names_that_a_terminal_would_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No line of the command line has them as they are, in whatever file they stand; letters of any language stay."""
    torch.save({CLEARS: torch.ones(2), f"{CLEARS}é": [5], "größe": torch.ones(1)}, tmp_path / "file.pt")
    for arguments in (
        ["inspect", "file.pt"],
        ["convert", "file.pt", "folder", "--to", "dcp"],
        ["inspect", "folder"],
        ["verify", "folder"],
        ["convert", "file.pt", "file.safetensors", "--to", "safetensors"],
        ["inspect", "file.safetensors"],
        ["convert", "folder", "other", "--to", "dcp", "--only", "nothing"],
    ):
        main([str(tmp_path / each) if "." in each or each in ("folder", "other") else each for each in arguments])
        shown = capsys.readouterr()
        for line in (shown.out + shown.err).split("\n"):
            assert line.isprintable(), repr(line)
        if arguments[0] == "inspect":
            assert "\\x1b[2Jmodel\\x1b]0;title\\x07\\r\\n\\u202eweights" in shown.out
            assert "größe" in shown.out
    data = tmp_path / "folder" / "__0_0.distcp"
    data.write_bytes(bytes(len(data.read_bytes())))
    assert main(["verify", str(tmp_path / "folder")]) == 1
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


@on_ranks(1)
def test_names_in_errors_of_loads(world: World, tmp_path: Path) -> None:
    save(tmp_path / "saved", {"model": {CLEARS: torch.ones(2)}})
    for state in ({"model": {CLEARS: torch.ones(3)}}, {"model": {CLEARS + "more": torch.ones(2)}}):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path / "saved", state)
        assert str(caught.value).isprintable()
