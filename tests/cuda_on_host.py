"""kernels.cu compiled for the host's processor, with the threads of cuda_on_host.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ranks import skip_at_home

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{FOLDER}")
EXPORT = 'extern "C" bool kernel_{}(u32 blocks, u32 threads, const u64 *args, u32 count)'


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

    def launch(self, name: str, blocks: int, threads: int, args: Sequence[int | float]) -> None:
        """Run a kernel until it ends."""
        bits = struct.pack("".join("d" if isinstance(arg, float) else "q" for arg in args), *args)
        function = getattr(self._library, f"kernel_{self._names.index(name)}")
        function.restype = ctypes.c_bool
        assert function(blocks, threads, bits, len(args)), f"{name}: {args} do not fit, or threads wait at a barrier forever"


def _without_ptx(source: str) -> str:
    """Replace each PTX instruction by a call of the function of its name."""
    calls = re.sub(
        r'asm\("([\w.]+) [^"]*" : "=\w"\((\w+)\) : (.*?)\);', lambda m: f"{m[2]} = {m[1].replace('.', '_')}({m[3]});", source
    )
    return re.sub(r'"\w"(\(\w+\))', r"\1", calls)
