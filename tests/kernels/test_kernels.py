"""The kernels: host versions against the reference, CUDA ones compiled for every architecture and their launches checked.

Without a GPU the real launch code runs against a double of CuPy, and the kernels of kernels.cu on the host's processor, in this
process's memory: block by block and thread by thread, with the barriers, but not the machine code, of a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # before a double of CuPy is there: at its import it looks into every module
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import shardrt  # noqa: F401  (makes shardrt.kernels importable from a checkout)
from cuda_on_host import CODINGS, EVERY_KERNEL, FLOATS, LISTS, PAIRS, Kernels, coding_kernels
from ranks import refused, skip_at_home
from shardrt.kernels import add_into, cuda, decode_sum, encode, pack_into, reference, rescale, squared_norm, total_norm

NUMELS = (0, 1, 3, 16, 1000, 20011)
CPU = torch.device("cpu")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(numels: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU, lead: int = 0) -> list[torch.Tensor]:
    """Tensors side by side in one buffer, `lead` elements into it: most are not aligned to 16 bytes."""
    generator = torch.Generator().manual_seed(sum(numels) + lead)
    flat = torch.randn(lead + sum(numels), generator=generator).to(dtype).to(device)
    return list(flat[lead:].split(list(numels)))


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), f"{one.dtype}, {one.numel()} elements"


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each in memory of its own, as it is aligned or not."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


# ---------------------------------------------------------------------- on whatever device


def check_pack(device: torch.device, out: torch.dtype, inp: torch.dtype) -> None:
    for lead, scale, accumulate in itertools.product((0, 1), (1.0, 0.25), (False, True)):
        views, tensors = random(NUMELS, out, device, lead), random(NUMELS, inp, device, 2 * lead)
        expected = copies(views)
        reference.pack(expected, copies(tensors), scale, accumulate)
        (add_into if accumulate else pack_into)(views, tensors, scale)
        same(copies(views), expected)


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    for lead in (0, 1):
        tensors = random(NUMELS, dtype, device, lead)
        expected = reference.squared_norm(copies(tensors))
        got = squared_norm(tensors, device)
        assert torch.allclose(got.cpu(), expected, rtol=1e-5)
        assert torch.equal(got, squared_norm([t.clone() for t in tensors], device)), "depends on the alignment"
        assert torch.allclose(total_norm(tensors, 2.0, device).cpu(), expected[0].sqrt(), rtol=1e-5)
        for value in (float("inf"), float("nan")):
            tensors[-1][-1] = value
            assert squared_norm(tensors, device)[1] == 1


def check_rescale(device: torch.device, dtype: torch.dtype) -> None:
    for scale in (1.0, 0.25, 0.3):
        tensors = random(NUMELS, dtype, device, 1)
        expected = copies(tensors)
        factor = torch.tensor(scale, dtype=torch.float64)
        reference.rescale(expected, factor)
        rescale(tensors, factor.to(device))
        same(copies(tensors), expected)


def check_layouts(device: torch.device) -> None:
    """Integers, tensors that are not dense, and ones laid out alike but not in rows, in one call."""
    shapes = [(4, 6), (5, 7), (3, 8), (2, 3)]
    dtypes = [torch.int32, torch.float32, torch.float32, torch.bool]
    tensors = [torch.arange(r * c, device=device).view(r, c).to(d) for (r, c), d in zip(shapes, dtypes, strict=True)]
    views = [torch.zeros_like(tensor) for tensor in tensors]
    for several, i in ((tensors, 1), (views, 2), (tensors, 2)):
        several[i] = several[i].t().contiguous().t()
    pack_into(views, tensors)
    same(copies(views), copies(tensors))


def check_mixture(device: torch.device) -> None:
    """A norm over several dtypes, with a tensor that torch does; an element of any that is not finite."""
    tensors = [t for dtype in FLOATS for t in random((5, 9000), dtype, device)]
    tensors.append(torch.ones(6, 4, device=device).t()[::2])
    expected = reference.squared_norm(copies(tensors))
    assert torch.allclose(squared_norm(tensors, device).cpu(), expected, rtol=1e-5)
    for tensor in tensors:
        value, tensor[-1] = tensor[-1].clone(), float("nan")
        assert squared_norm(tensors, device)[1] == 1, f"{tensor.dtype}, {tensor.numel()} elements"
        tensor[-1] = value
    complex_one = torch.tensor([3 + 4j], device=device)
    assert squared_norm([complex_one], device).tolist() == [25, 0]


def check_many_chunks(device: torch.device) -> None:
    """More of them than the last block has threads; always in the same order, though blocks arrive in another."""
    tensors = [torch.randn(300 * cuda.CHUNK_NBYTES // 8 + 1, dtype=torch.float64, device=device)]
    found = squared_norm(tensors, device)
    assert torch.allclose(found.cpu(), reference.squared_norm(copies(tensors)), rtol=1e-12)
    for _ in range(100 if device.type == "cuda" else 1):
        assert torch.equal(squared_norm(tensors, device), found)


def check_codes(device: torch.device, code: torch.dtype, dtype: torch.dtype) -> None:
    """Three rows of blocks: of every size of numbers, with zeros, a tiny block, and blocks that are not finite."""
    for numel in (0, 1, 255, 256, 2049, 66000):
        blocks = -(-numel // reference.BLOCK)
        (x,) = random((3 * numel,), dtype, lead=1)
        x = x.view(3, numel) * 10.0 ** torch.linspace(-6, 3, numel).to(dtype)
        x[0, 256:300], x[1, 512:1024], x[2, 1024:1030], x[2, 2048:2049] = 0, 1e-38, float("nan"), float("-inf")
        rows = [
            (torch.zeros(3, numel).to(code).to(d), torch.zeros(3, blocks, dtype=torch.float32, device=d)) for d in (CPU, device)
        ]
        for encoder, (codes, scales) in zip((reference.encode, encode), rows, strict=True):
            for r in range(3):
                encoder(codes[r], scales[r], x[r].to(codes.device))
        assert torch.equal(rows[1][0].cpu().view(torch.uint8), rows[0][0].view(torch.uint8))
        assert torch.equal(rows[1][1].cpu().view(torch.int32) & 0x7FFFFFFF, rows[0][1].view(torch.int32) & 0x7FFFFFFF)
        outs = [torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype, device=device)]
        reference.decode_sum(outs[0], *rows[0])
        decode_sum(outs[1], *rows[1])
        assert torch.equal(outs[1].cpu().nan_to_num(7.0), outs[0].nan_to_num(7.0))


# ---------------------------------------------------------------------- the host


@pytest.mark.parametrize(("out", "inp"), PAIRS, ids=lambda dtype: name(dtype))
def test_host_pack(out: torch.dtype, inp: torch.dtype) -> None:
    check_pack(CPU, out, inp)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_host_norm_and_rescale(dtype: torch.dtype) -> None:
    check_norm(CPU, dtype)
    check_rescale(CPU, dtype)


@pytest.mark.parametrize(("code", "dtype"), CODINGS, ids=lambda dtype: name(dtype))
def test_host_codes(code: torch.dtype, dtype: torch.dtype) -> None:
    check_codes(CPU, code, dtype)


def test_host_layouts_and_mixture() -> None:
    check_layouts(CPU)
    check_mixture(CPU)


def test_host_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_codes(CPU, torch.int8, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


def test_scale_comes_before_the_cast() -> None:
    """A gradient that float16 cannot hold, but a quarter of it."""
    view = torch.zeros(2, dtype=torch.float16)
    pack_into([view], [torch.tensor([196608.0, 1.0])], 0.25)
    assert view.tolist() == [49152.0, 0.25]


def test_flag_is_about_elements() -> None:
    """1e30 is finite, though its square is not in float32."""
    assert squared_norm([torch.tensor([1e30])], CPU)[1] == 0
    assert squared_norm([], CPU).tolist() == [0, 0]


@pytest.mark.parametrize(("code", "error"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 16 / 448)], ids=("int8", "fp8"))
def test_codes_are_near(code: torch.dtype, error: float) -> None:
    """Within half a step of the largest code; rows add up; one bad element spoils its block alone."""
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    codes, scales, out = torch.zeros(2, 1000).to(code), torch.zeros(2, 4), torch.zeros(1000)
    for r in range(2):
        encode(codes[r], scales[r], x[r])
    decode_sum(out, codes, scales)
    bound = F.pad(x, (0, 24)).view(2, 4, 256).abs().amax(2).sum(0).repeat_interleave(256)[:1000] * error
    assert ((out - x.sum(0)).abs() <= bound * 1.001).all()
    x[0, 300] = float("inf")
    encode(codes[0], scales[0], x[0])
    decode_sum(out, codes[:1], scales[:1])
    assert out.isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_code_tensors_are_checked() -> None:
    refused("encode: expected contiguous", lambda: encode(torch.zeros(300, dtype=torch.int8), torch.zeros(1), torch.zeros(300)))
    with pytest.raises(ValueError, match=r"decode_sum: .*float64"):
        decode_sum(torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.int8), torch.zeros(1, 1))


# ---------------------------------------------------------------------- the launches, without a GPU


@dataclass
class Double:
    """CuPy, as far as it is used. `kernels` work in this process's memory; `launches` has their names and grids."""

    kernels: Kernels
    launches: list[tuple[str, int]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    stream: int = 0x5EED

    def module(
        self, code: str, *, backend: str, options: tuple[str, ...], name_expressions: tuple[str, ...]
    ) -> SimpleNamespace:
        assert (backend, options) == ("nvrtc", cuda.OPTIONS)
        assert "__global__" in code
        return SimpleNamespace(get_function=lambda name: {each: Run(self, each) for each in name_expressions}[name])

    def from_external(self, stream: Any) -> CurrentStream:
        version, handle = stream.__cuda_stream__()
        assert version == 0
        return CurrentStream(self, handle)


@dataclass
class CurrentStream:
    """CuPy's, current while its block runs; again and again."""

    double: Double
    handle: int

    def __enter__(self) -> None:
        self.double.streams.append(self.handle)

    def __exit__(self, *_: object) -> None: ...


@dataclass
class Run:
    """A kernel of the double."""

    double: Double
    kernel: str

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self.double.launches.append((self.kernel, grid[0]))
        assert len(grid) == len(block) == 1
        assert grid[0] > 0
        assert all(type(arg) in (int, float, numpy.ndarray) for arg in args), args
        self.double.kernels.launch(self.kernel, grid[0], block[0], args)


@pytest.fixture(scope="session")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(cuda.SOURCE.read_text(), EVERY_KERNEL, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, on_host: Kernels) -> Iterator[Double]:
    """CPU tensors take the way of CUDA ones, as far as the double."""
    made = Double(on_host)
    stream = SimpleNamespace(from_external=made.from_external)
    cupy = SimpleNamespace(RawModule=made.module, cuda=SimpleNamespace(Stream=stream))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "_stream", lambda device: cuda._Handle(made.stream))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(cuda, "_plans", {})
    for cached in (cuda._kernel, cuda._cupys, cuda._counter):
        cached.cache_clear()
    yield made
    for cached in (cuda._kernel, cuda._cupys, cuda._counter):
        cached.cache_clear()


@pytest.mark.parametrize(("out", "inp"), PAIRS, ids=lambda dtype: name(dtype))
def test_launched_pack(double: Double, out: torch.dtype, inp: torch.dtype) -> None:
    check_pack(CPU, out, inp)
    blocks = sum(-(-numel * max(out.itemsize, inp.itemsize) // cuda.CHUNK_NBYTES) for numel in NUMELS)
    assert [grid for _, grid in double.launches] == [blocks] * 8  # one each


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_launched_norm_and_rescale(double: Double, dtype: torch.dtype) -> None:
    check_norm(CPU, dtype)
    check_rescale(CPU, dtype)


@pytest.mark.parametrize(("code", "dtype"), CODINGS, ids=lambda dtype: name(dtype))
def test_launched_codes(double: Double, code: torch.dtype, dtype: torch.dtype) -> None:
    check_codes(CPU, code, dtype)
    assert {kernel for kernel, _ in double.launches} == set(coding_kernels(code, dtype))


def test_launched_layouts(double: Double) -> None:
    """Only what lies in rows of its own order is left to torch."""
    check_layouts(CPU)
    assert [kernel for kernel, _ in double.launches] == ["copy<u32>", "copy<u8>"]
    ((plan,),) = cuda._plans.values()
    assert plan.rest == [1]


def test_launched_mixture(double: Double) -> None:
    check_mixture(CPU)
    kernels = [kernel for kernel, _ in double.launches]
    assert kernels == [f"squares<{one}>" for one in cuda.FLOATS.values()] * (2 + 2 * len(FLOATS))


@pytest.mark.rest
def test_launched_norm_of_many_chunks(double: Double) -> None:
    check_many_chunks(CPU)
    assert double.launches == [("squares<double>", 301)] * 2


@pytest.mark.parametrize("kernel", ["copy<u8>", "pack<float, f16, false>"])
def test_launched_beyond_32_bits(double: Double, kernel: str) -> None:
    """A launch of nothing but the last chunk of a tensor of more than 3 * 2**32 elements."""
    out, inp = (
        (torch.zeros(5), torch.ones(5).half()) if "pack" in kernel else (torch.zeros(5, dtype=torch.int8), torch.ones(5).char())
    )
    chunk = cuda.CHUNK_NBYTES // out.element_size()
    start = 3 * 2**32 // chunk * chunk
    lists = cuda.lists_of([start + 5], chunk)[0].copy()
    fields = lists.view(LISTS)
    fields["addresses"][0, [0, cuda.TENSORS]] = [each.data_ptr() - start * each.element_size() for each in (out, inp)]
    fields["first"][0, 0] = 2**32 - start // chunk  # the block is its first, and so chunk 0 lies far before
    scale = (1.0,) if "pack" in kernel else ()
    double.kernels.launch(kernel, 1, cuda.THREADS, (lists, *scale))
    assert torch.equal(out, inp.to(out.dtype))


def test_nothing_is_uploaded(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are arguments of a launch, also new ones: a CUDA graph would replay a copy from memory that has been reused."""
    views, tensors, scale = random(NUMELS, torch.float32), random(NUMELS, torch.bfloat16), torch.tensor(0.5)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    for stream in (0x5EED, 0xFEED):
        double.stream = stream
        for sources in (tensors, [t.clone() for t in tensors], [t.clone() for t in tensors[:-1]] + [tensors[-1]]):
            pack_into(views, sources)
            same(views, [source.float() for source in sources])
            rescale(views, scale)
            assert squared_norm(views, CPU)[1] == 0
    assert len(cuda._plans) == 3
    assert [double.streams[0], double.streams[-1]] == [0x5EED, 0xFEED]


def test_captured_norms_have_counters_of_their_own(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs may run at once, and a launch beside them, though all were captured, and launched, on one stream."""
    counters, tensors = list[int](), random(NUMELS, torch.float32)
    run, made = cuda._run, list[torch.Tensor]()
    zeros = torch.zeros

    def kept(*sizes: int, **given: Any) -> torch.Tensor:
        made.append(zeros(*sizes, **given))
        return made[-1]

    def noted(batch: cuda.Batch, lists: Any, args: tuple[int, ...]) -> None:
        counters.append(args[1])
        run(batch, lists, args)

    monkeypatch.setattr(cuda, "_run", noted)
    monkeypatch.setattr(torch, "zeros", kept)
    for is_capturing in (False, True, True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        squared_norm(tensors, CPU)
    first, second, third, fourth = counters
    assert first == fourth
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("count", [cuda.TENSORS - 1, cuda.TENSORS, cuda.TENSORS + 2, 3 * cuda.TENSORS])
def test_long_lists_take_several_launches(double: Double, count: int) -> None:
    """With tensors without elements first, in between and last, and a tensor of several chunks."""
    numels = [0 if i % 7 in (0, 3) or i == count - 1 else 20011 if i == count - 2 else i % 50 for i in range(count)]
    views, tensors = random(tuple(numels), torch.float32), random(tuple(numels), torch.float16)
    pack_into(views, tensors, 0.5)
    same(views, [tensor.float() * 0.5 for tensor in tensors])
    launched = -(-count // cuda.TENSORS)
    assert len(double.launches) == launched
    found = squared_norm(views, CPU)
    assert torch.allclose(found, reference.squared_norm(views), rtol=1e-5)
    rescale(views, torch.tensor(2.0))
    same(views, [tensor.float() for tensor in tensors])
    assert len(double.launches) == 3 * launched


def test_other_tensors_get_another_plan(double: Double) -> None:
    """The same views, with sources of another dtype, then shape, then order in memory."""
    cuda._plans.clear()
    views = [torch.zeros(4, 6), torch.zeros(9)]
    for first in (torch.ones(4, 6), torch.full((4, 6), 2.0).half(), torch.arange(24.0).view(6, 4).t()):
        pack_into(views, [first, torch.ones(9)])
        assert torch.equal(views[0], first.float())
    assert [kernel for kernel, _ in double.launches] == ["copy<u32>", "pack<float, f16, false>", "copy<u32>", "copy<u32>"]
    found, _ = cuda._plans.values()  # for each pair of dtypes
    newest, plan = found
    assert newest.batches[0].kernel == plan.batches[0].kernel == "copy<u32>"
    cached, tensors = newest.guards, [views[0], views[1], first, torch.ones(9)]
    assert cached.check(*tensors)
    assert not cached.check(views[0].half(), *tensors[1:])
    assert not cached.check(views[0].to("meta"), *tensors[1:])
    assert not cached.check(views[0].t().contiguous().t(), *tensors[1:])
    pack_into([torch.zeros(4, 6), torch.zeros(9)], [first.clone(), torch.ones(9)])  # alike, such as the next step's gradients
    assert cuda._plan(cuda._pack_name, (views, [torch.ones(4, 6), torch.ones(9)]), (True, False)) is plan  # it is kept
    assert found in cuda._plans.values()
    for rows in range(1, 3 * cuda._ALIKE):  # of equal ends
        pack_into([torch.zeros(3), torch.zeros(rows), torch.zeros(5)], [torch.ones(3), torch.ones(rows), torch.ones(5)])
    assert [len(plans) for plans in cuda._plans.values()] == [2, 1, cuda._ALIKE]


def test_launched_whatever_the_default_device(double: Double) -> None:
    """Counters are made on the tensors' own."""
    views, tensors, scale = random(NUMELS, torch.float32), random(NUMELS, torch.bfloat16), torch.tensor(0.5)
    with torch.device("meta"):
        pack_into(views, tensors)
        rescale(views, scale)
        assert squared_norm(views, CPU)[0] > 0
    same(views, [tensor.float() * 0.5 for tensor in tensors])


def test_nothing_to_do_is_no_launch(double: Double) -> None:
    pack_into([], [])
    pack_into([torch.zeros(0)], [torch.zeros(0)])
    rescale([torch.zeros(0)], torch.tensor(2.0))
    assert double.launches == []


def test_wrong_shapes_are_refused(double: Double) -> None:
    refused("size of tensor", lambda: pack_into([torch.zeros(4)], [torch.zeros(3)]), RuntimeError)
    assert double.launches == []


def test_offsets_beyond_32_bits() -> None:
    """The last chunk of a tensor of 3 * 2**32 elements ends where it does, and the next tensor begins anew."""
    numels, size = (7, 3 * 2**32 + 5, 0, 2 * 4096), 4096
    lists, chunks = cuda.lists_of(numels, size)
    fields = lists.view(LISTS)
    elements, first = (torch.from_numpy(fields[name][0].astype("int64")) for name in ("elements", "first"))
    assert elements[:5].tolist() == [*numels, 0]
    assert first[4:].tolist() == [2**32 - 1] * (cuda.TENSORS - 4)
    blocks = torch.arange(chunks)
    owners = torch.searchsorted(first, blocks, right=True) - 1
    starts = (blocks - first[owners]) * size
    counts = (elements[owners] - starts).clamp(max=size)
    assert counts.min() > 0
    covered = torch.zeros(4, dtype=torch.int64).index_add_(0, owners, counts)
    assert covered.tolist() == list(numels)
    assert (int(starts[owners == 1].max()), int(counts[owners == 1][-1])) == (3 * 2**32, 5)


def test_cupy_passes_arrays_of_one_element_by_value() -> None:
    """The installed CuPy looks at the arguments before it needs a driver, and refuses others."""
    if importlib.util.find_spec("cupy") is None:
        skip_at_home("CuPy is not installed")
    function = importlib.import_module("cupy.cuda.function")
    kernel, lists = function.Function.__new__(function.Function), cuda.lists_of([3, 5], 4)[0]
    with pytest.raises(TypeError, match=r"Only numpy\.ndarrays of size one"):
        kernel((1,), (1,), (numpy.concatenate([lists, lists]),), stream=SimpleNamespace(ptr=0))
    with pytest.raises(RuntimeError, match="CUDA"):  # there is no driver, or the kernel is none
        kernel((1,), (1,), (lists, 0.5, 3), stream=SimpleNamespace(ptr=0))
    assert function.CNumpyArray(lists).ptr == lists.ctypes.data


def test_tensors_that_hold_others_are_left_to_torch(double: Double) -> None:
    """A gradient may be of a subclass that has no memory of its own."""
    held, views = torch.randn(7), [torch.zeros(7), torch.zeros(7)]
    for tensors in ([held, held], [held, TwoTensor(held, held.clone())], [held, held]):  # of equal shapes, strides and dtypes
        plan = cuda._plan(cuda._pack_name, (views, tensors), (True, False))
        assert plan.rest == [i for i, tensor in enumerate(tensors) if type(tensor) is TwoTensor]


# ---------------------------------------------------------------------- compiled, without a GPU


def nvrtc(wheel: str) -> ctypes.CDLL:
    """The library of the wheel, and before it its builtins, which it would look for on the loader's path alone."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        skip_at_home(f"NVRTC is not installed: pip install {wheel}")
    for name in (r"libnvrtc-builtins\.so\.[\d.]+", r"libnvrtc\.so\.\d+"):
        (path,) = (str(file.locate()) for file in files if re.fullmatch(name, file.name))
        library = ctypes.CDLL(path)
    return library


def read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.raw


CUDA_12, CUDA_13 = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"
ALWAYS = ("sm_90", CUDA_13)
OTHERS = sorted(set(itertools.product(("sm_80", "sm_90", "sm_100"), (CUDA_12, CUDA_13))) - {ALWAYS})


@pytest.mark.rest
@pytest.mark.parametrize(("arch", "wheel"), [ALWAYS, *(pytest.param(*each, marks=pytest.mark.all) for each in OTHERS)])
def test_kernels_compile(arch: str, wheel: str) -> None:
    """To machine code, with the options of CuPy, without a word from the compiler, of spills too; all names are symbols."""
    library, program = nvrtc(wheel), ctypes.c_void_p()
    source = cuda.SOURCE.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    for kernel in EVERY_KERNEL:
        assert library.nvrtcAddNameExpression(program, kernel.encode()) == 0
    warnings = [f"--ptxas-options=--{what}" for what in ("warn-on-spills", "warn-on-local-memory-usage")]
    options = [option.encode() for option in (*cuda.OPTIONS, "-ftz=true", f"--gpu-architecture={arch}", *warnings)]
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert (code, read(library, program, "ProgramLog").strip(b"\0\n ")) == (0, b"")
    binary, symbol = read(library, program, "CUBIN"), ctypes.c_char_p()
    for kernel in EVERY_KERNEL:
        assert library.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(symbol)) == 0
        assert b".text." + (symbol.value or b"?") + b"\0" in binary, kernel
    library.nvrtcDestroyProgram(ctypes.byref(program))


def test_constants_are_those_of_the_source() -> None:
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", cuda.SOURCE.read_text()))
    assert {key: int(value) for key, value in found.items()}.items() >= {
        "THREADS": cuda.THREADS,
        "CHUNK_BYTES": cuda.CHUNK_NBYTES,
        "TENSORS": cuda.TENSORS,
        "BLOCK": reference.BLOCK,
    }.items()


# ---------------------------------------------------------------------- on a GPU

ON_GPU = [
    *(pytest.param(check_pack, pair, id=f"pack-{name(pair[0])}-{name(pair[1])}") for pair in PAIRS),
    *(pytest.param(check_norm, (dtype,), id=f"norm-{name(dtype)}") for dtype in FLOATS),
    *(pytest.param(check_rescale, (dtype,), id=f"rescale-{name(dtype)}") for dtype in FLOATS),
    *(pytest.param(check_codes, pair, id=f"codes-{name(pair[0])}-{name(pair[1])}") for pair in CODINGS),
    *(pytest.param(check, (), id=check.__name__) for check in (check_layouts, check_mixture, check_many_chunks)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("check", "dtypes"), ON_GPU)
def test_kernels_on_a_gpu(check: Callable[..., None], dtypes: tuple[torch.dtype, ...]) -> None:
    """On a stream of its own: nothing may wait for, or run on, the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        check(torch.device("cuda", torch.cuda.current_device()), *dtypes)
