"""kernels.cu compiled for the host's processor, with the threads of cuda_on_host.h."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from numpy import void
from numpy.typing import NDArray

from ranks import skip_at_home
from shardrt.kernels import cuda
from shardrt.kernels.cuda import Arguments

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{FOLDER}")
EXPORT = 'extern "C" bool kernel_{}(u32 blocks, u32 threads, const host::Argument *args, u32 count)'


class Kernels:
    """The instantiations `names` of the kernels in `source`, compiled in `folder`."""

    def __init__(self, source: str, names: Sequence[str], folder: Path) -> None:
        compiler = shutil.which("c++")
        if compiler is None:
            skip_at_home("no C++ compiler on the PATH")
        self._names = names
        calls = [
            f"{EXPORT.format(i)} {{ return host::call({name}, blocks, threads, args, count); }}" for i, name in enumerate(names)
        ]
        code, library = folder / "kernels.cpp", folder / "kernels.so"
        code.write_text("\n".join(['#include "cuda_on_host.h"', _without_ptx(source), *calls]))
        done = subprocess.run([compiler, *OPTIONS, str(code), "-o", str(library)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, blocks: int, threads: int, args: Arguments) -> None:
        """Run a kernel until it ends."""
        values = [_bytes_of(arg) for arg in args]
        pairs = [number for value in values for number in (ctypes.addressof(value), len(value))]
        function = getattr(self._library, f"kernel_{self._names.index(name)}")
        function.restype = ctypes.c_bool
        given = (ctypes.c_uint64 * len(pairs))(*pairs)
        assert function(blocks, threads, given, len(args)), f"{name}: {args} do not fit, or threads wait at a barrier forever"


def _bytes_of(arg: int | float | NDArray[void]) -> ctypes.Array[ctypes.c_char]:
    """A copy of an argument, as CuPy passes it on."""
    if isinstance(arg, int | float):
        return ctypes.create_string_buffer(struct.pack("d" if isinstance(arg, float) else "q", arg), 8)
    assert arg.size == 1, "CuPy takes arrays of one element"
    return ctypes.create_string_buffer(arg.tobytes(), arg.nbytes)


def _without_ptx(source: str) -> str:
    """Replace each PTX instruction by a call of the function of its name."""
    calls = re.sub(
        r'asm\("([\w.]+) [^"]*" : "=\w"\((\w+)\) : (.*?)\);', lambda m: f"{m[2]} = {m[1].replace('.', '_')}({m[3]});", source
    )
    return re.sub(r'"\w"(\(\w+\))', r"\1", calls)


FLOATS = list(cuda.FLOATS)


CODINGS = list(itertools.product(cuda.CODES, FLOATS[:1] + FLOATS[2:]))  # not float64


PAIRS = list(itertools.product(FLOATS, FLOATS))


LISTS = numpy.dtype([("addresses", "i8", 2 * cuda.TENSORS), ("elements", "i8", cuda.TENSORS), ("first", "u4", cuda.TENSORS)])


def coding_kernels(code: torch.dtype, dtype: torch.dtype) -> list[str]:
    """What encodes and decodes."""
    return [f"encode<{cuda.CODES[code]}, {cuda.FLOATS[dtype]}>", f"decode_sum<{cuda.FLOATS[dtype]}, {cuda.CODES[code]}>"]


EVERY_KERNEL = [
    *(f"copy<{word}>" for word in cuda.WORDS.values()),
    *(f"{base}<{one}>" for base in ("rescale", "squares") for one in cuda.FLOATS.values()),
    *(f"pack<{cuda.FLOATS[out]}, {cuda.FLOATS[inp]}, {adds}>" for out, inp in PAIRS for adds in ("true", "false")),
    *(kernel for pair in CODINGS for kernel in coding_kernels(*pair)),
]
