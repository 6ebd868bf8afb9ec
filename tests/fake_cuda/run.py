"""Run the Python processes of a command as on a machine with GPUs, without one, and find races between CUDA streams.

    python tests/fake_cuda/run.py [--gpus N] COMMAND ...

Takes a CUDA 13 build of torch, CuPy, mpi4py, an MPI, nvidia-cuda-crt (headers), and a C++ compiler. It replaces libcudart
and libnccl, which torch and CuPy's binding load. The code of shardrt, torch's allocator, its streams and its events are real,
and results are right; only timing is not. "On GPUs" in docs/performance.md lists what this cannot find.

    python tests/fake_cuda/run.py --gpus 4 env SHARDRT_TEST_DEVICE=cuda python -m pytest tests/fsdp/test_evaluation.py
    python tests/fake_cuda/run.py --gpus 2 mpirun -n 2 python scripts/gpu_check.py --suite together
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "fake_cuda"
COMPILE = ("c++", "-std=c++17", "-O2", "-fPIC", "-shared")


def symbols(*options: str) -> set[str]:
    """The symbols that nm lists, without versions."""
    found = subprocess.run(["nm", "-D", *options], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in found.splitlines() if line}


def build(libraries: Path) -> Path:
    """The folder with the two libraries, which are compiled unless an earlier run has: its name says what they were made of.

    Other functions that torch and CuPy import from them become stubs that do nothing. Runs at the same time compile in folders
    of their own; the first to end names its folder, and the others take that one.
    """
    binaries = sorted(
        [
            *libraries.glob("torch/lib/*.so"),
            *libraries.glob("nvidia/**/lib/*.so*"),
            *libraries.glob("cupy_backends/cuda/libs/nccl*.so"),
        ]
    )
    headers = sorted(path.parent for path in libraries.glob("nvidia/**/cuda_runtime_api.h"))
    finished = BUILD / digest(binaries, headers)
    if not finished.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            compile_both(made, binaries, headers)
            with contextlib.suppress(OSError):  # another run was faster
                made.rename(finished)
    return finished


def digest(binaries: list[Path], headers: list[Path]) -> str:
    """Of everything that the result depends on: sources, commands, and the libraries that import from it."""
    sources = [HERE / "cudart.cpp", HERE / "nccl.cpp", Path(__file__)]
    about = [str((path, path.stat().st_size, path.stat().st_mtime_ns)) for path in binaries]
    content = [*(path.read_bytes() for path in sources), repr((COMPILE, headers, about)).encode()]
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:16]


def compile_both(into: Path, binaries: list[Path], headers: list[Path]) -> None:
    wanted = set().union(*(symbols("--undefined-only", str(path)) for path in binaries))
    versions = into / "versions"
    versions.write_text("libcudart.so.13 { global: cuda*; __cuda*; };\nOTHERS { global: cu[A-Z]*; fake_*; };\n")
    cuda = [*(f"-I{path}" for path in headers), f"-Wl,-soname,libcudart.so.13,--version-script={versions}"]
    cudart = into / "libcudart.so.13"
    compile_with_stubs("cudart", cudart, r"(__)?cu(da)?[A-Z]\w*", wanted, cuda)
    (into / "libcuda.so.1").symlink_to(cudart.name)
    options = ["-Wl,-soname,libnccl.so.2", str(cudart), "-lrt"]
    compile_with_stubs("nccl", into / "libnccl.so.2", r"nccl[A-Z]\w*", wanted, options)


def compile_with_stubs(name: str, target: Path, pattern: str, wanted: set[str], options: list[str]) -> None:
    """Compile HERE/name.cpp, then once more with a stub that returns 0 for each wanted function that it lacks."""
    stubs = target.with_name(f"{name}_stubs.cpp")
    command = [*COMPILE, str(HERE / f"{name}.cpp"), *options, "-o", str(target)]
    subprocess.run(command, check=True)
    missing = sorted(each for each in wanted - symbols("--defined-only", str(target)) if re.fullmatch(pattern, each))
    stubs.write_text("".join(f'extern "C" int {each}() {{ return 0; }}\n' for each in missing))
    subprocess.run([*command, str(stubs)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("expected a command, such as: python -m pytest")
    folder = build(Path(sysconfig.get_path("platlib")))
    environment = os.environ | {
        "LD_PRELOAD": f"{folder / 'libcudart.so.13'} {folder / 'libnccl.so.2'}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "FAKE_GPUS": str(options.gpus),
        "OMP_NUM_THREADS": "1",
    }
    os.execvpe(options.command[0], options.command, environment)


if __name__ == "__main__":
    main()
