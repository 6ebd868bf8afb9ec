"""Which CUDA torch, CuPy and NCCL are built for: it has to be one version.

Hazard: torch from PyPI brings the NCCL wheel of its own CUDA, and the extra of another CUDA brings a second one. Both own the
same file: the later install overwrites it, and the removal of either deletes it.
"""

from __future__ import annotations

import mmap
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from ...ending.words import name_ranks

_WHEELS = [name.format(major) for name in ("cupy-cuda{}x", "nvidia-nccl-cu{}") for major in range(11, 16)]
_BUILT_FOR = re.compile(rb"NCCL version \d+\.\d+\.\d+\+cuda(\d+)\.\d+")


class CudaBuilds(NamedTuple):
    """The major versions of CUDA that a rank's libraries are built for; None: not installed, or not known."""

    torch: int
    cupy: int | None
    nccl: tuple[int, ...]  # one for each loaded library that tells
    wheels: tuple[str, ...]  # those of CuPy and NCCL that are installed

    def __str__(self) -> str:
        others = [("CuPy", [self.cupy] if self.cupy else []), ("NCCL", self.nccl)]
        found = [f"{name} for {' and '.join(map(str, majors))}" for name, majors in others if majors]
        wheels = f"; installed: {', '.join(self.wheels)}" if self.wheels else ""
        return f"torch is built for CUDA {self.torch}{''.join(f', {each}' for each in found)}{wheels}"

    @property
    def fit(self) -> bool:
        """True if they go together."""
        nccl_wheels = [wheel for wheel in self.wheels if wheel.startswith("nvidia-nccl")]
        return len(nccl_wheels) < 2 and {self.torch, self.cupy or self.torch, *self.nccl} == {self.torch}


class CudaBuildError(RuntimeError):
    """A rank's torch, CuPy and NCCL are not built for one version of CUDA. Every rank raises it."""


def own_builds() -> CudaBuilds | None:
    """The builds of this process; None if torch is not built for CUDA. Imports CuPy, which loads NCCL."""
    if torch.version.cuda is None:
        return None
    of_cupy = None
    with suppress(ImportError):  # the backend says what to install
        from cupy.cuda import nccl, runtime  # noqa: F401  # the first loads NCCL

        of_cupy = runtime.runtimeGetVersion() // 1000  # the version of the runtime in it, which takes no driver to ask for
    of_nccl = sorted({major for path in loaded_nccls() if (major := _built_for(path)) is not None})
    wheels = tuple(filter(_is_installed, _WHEELS))
    return CudaBuilds(int(torch.version.cuda.split(".")[0]), of_cupy, tuple(of_nccl), wheels)


def check_builds(builds: Sequence[CudaBuilds | None]) -> None:
    """Raise CudaBuildError unless the builds of each rank go together. builds: of all ranks, in their order."""
    ranks: dict[CudaBuilds, list[int]] = defaultdict(list)
    for rank, found in enumerate(builds):
        if found is not None and not found.fit:
            ranks[found].append(rank)
    if ranks:
        raise CudaBuildError("\n".join(_line(found, name_ranks(at)) for found, at in ranks.items()))


def _line(found: CudaBuilds, ranks: str) -> str:
    remove = f"pip uninstall {' '.join(found.wheels)} && " if found.wheels else ""
    advice = f"{remove}pip install cupy-cuda{found.torch}x nvidia-nccl-cu{found.torch}"
    return f"{ranks}: {found}; expected one CUDA for all, and one wheel of NCCL. To have torch's: {advice}"


def loaded_nccls() -> list[str]:
    """The paths of every loaded libnccl; one, unless torch and CuPy use different ones."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libnccl.so" in line}
    return sorted(paths)


def _is_installed(wheel: str) -> bool:
    try:
        version(wheel)
    except PackageNotFoundError:
        return False
    return True


def _built_for(path: str) -> int | None:
    """The CUDA that a libnccl is built for, as text in it says. Cost: reads some MB, until the text."""
    try:
        with open(path, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _BUILT_FOR.search(content)
            return None if found is None else int(found[1])
    except OSError:  # replaced, or deleted, since it was loaded
        return None
