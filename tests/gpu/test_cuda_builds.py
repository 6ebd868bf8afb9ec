"""torch, CuPy and NCCL have to be built for one version of CUDA; on a rank whose do not go together, all ranks raise."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ranks import run_script, skip_at_home
from shardrt.comm.backends.nccl import cuda_builds
from shardrt.comm.backends.nccl.cuda_builds import CudaBuildError, CudaBuilds, check_builds, loaded_nccls, own_builds

WHEELS_12, WHEELS_13 = (("cupy-cuda12x", "nvidia-nccl-cu12"), ("cupy-cuda13x", "nvidia-nccl-cu13"))
GOOD = CudaBuilds(13, 13, (13,), WHEELS_13)
NCCL_TEXT = b"\0NCCL version 2.29.7 compiled with CUDA 13.2\n\0NCCL version %d\0NCCL version 2.29.7+cuda13.2\0"


def test_those_that_go_together() -> None:
    cpu_build = None
    check_builds([GOOD, CudaBuilds(12, 12, (12, 12), WHEELS_12), CudaBuilds(13, None, (), ()), cpu_build])


@pytest.mark.parametrize(
    ("wrong", "found", "advice"),
    [
        (
            CudaBuilds(13, 12, (12,), WHEELS_12),
            "torch is built for CUDA 13, CuPy for 12, NCCL for 12; installed: cupy-cuda12x, nvidia-nccl-cu12",
            "pip uninstall cupy-cuda12x nvidia-nccl-cu12 && pip install cupy-cuda13x nvidia-nccl-cu13",
        ),
        (
            CudaBuilds(12, 13, (12,), ()),
            "torch is built for CUDA 12, CuPy for 13, NCCL for 12;",
            "pip install cupy-cuda12x nvidia-nccl-cu12",
        ),
        (CudaBuilds(13, 13, (12, 13), ()), "CuPy for 13, NCCL for 12 and 13;", "pip install cupy-cuda13x nvidia-nccl-cu13"),
        (
            CudaBuilds(13, 13, (13,), ("cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")),
            "and one wheel of NCCL",
            "pip uninstall cupy-cuda13x nvidia-nccl-cu12 nvidia-nccl-cu13 && pip install cupy-cuda13x nvidia-nccl-cu13",
        ),
    ],
)
def test_those_that_do_not(wrong: CudaBuilds, found: str, advice: str) -> None:
    with pytest.raises(CudaBuildError) as raised:
        check_builds([GOOD, wrong, GOOD, wrong])
    (line,) = str(raised.value).splitlines()
    assert line.startswith("ranks 1, 3: torch is built for CUDA")
    assert found in line
    assert line.endswith(f"To have torch's: {advice}")


def test_what_a_process_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From CuPy's runtime, the text in the loaded library, and the installed wheels."""
    cupy, cuda, runtime = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
    vars(cupy).update(cuda=cuda)
    vars(cuda).update(nccl=ModuleType("cupy.cuda.nccl"), runtime=runtime)
    vars(runtime).update(runtimeGetVersion=lambda: 12090)
    for module in (cupy, cuda, cuda.nccl, runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    library, older = tmp_path / "libnccl.so.2", tmp_path / "older"
    library.write_bytes(NCCL_TEXT)
    older.write_bytes(b"NCCL version %d")
    monkeypatch.setattr(cuda_builds, "loaded_nccls", lambda: [str(library), str(older), str(tmp_path / "deleted")])
    monkeypatch.setattr(cuda_builds, "_is_installed", lambda wheel: wheel in WHEELS_13)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert own_builds() == CudaBuilds(13, 12, (13,), WHEELS_13)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert own_builds() == CudaBuilds(13, None, (13,), WHEELS_13)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert own_builds() is None


@pytest.mark.filterwarnings("ignore")  # CuPy warns where there is no GPU
def test_what_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of CuPy or NCCL is built for the CUDA that its name says."""
    wheels = {str(each.metadata["Name"]): each for each in importlib.metadata.distributions()}
    majors = {name: int(match[1]) for name in wheels if (match := re.fullmatch(r"(?:cupy-cuda|nvidia-nccl-cu)(\d+)x?", name))}
    if not any(name.startswith("cupy") for name in majors):
        skip_at_home("no wheel of CuPy")
    monkeypatch.setattr(torch.version, "cuda", f"{max(majors.values())}.0")  # the build for the CPU has None
    found = own_builds()
    assert found is not None
    assert set(found.wheels) == set(majors)
    assert {found.cupy} == {major for name, major in majors.items() if name.startswith("cupy")}
    assert loaded_nccls()
    for name in filter(lambda name: name.startswith("nvidia"), majors):  # the stand-in is loaded instead, and does not tell
        assert cuda_builds._built_for(str(wheels[name].locate_file("nvidia/nccl/lib/libnccl.so.2"))) == majors[name]
    check_builds([found])


MIXED = """
import os, sys
from types import SimpleNamespace
import torch
from mpi4py import MPI
import shardrt
from shardrt.comm.startup import bootstrap
from shardrt.comm.backends.nccl.cuda_builds import CudaBuilds

rank = MPI.COMM_WORLD.Get_rank()
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=index)
torch.cuda.set_device = lambda index: None
bootstrap.own_builds = lambda: CudaBuilds(13, 12 if rank == 1 else 13, (13,), ())
shardrt.init("cuda")
"""


def test_every_rank_raises() -> None:
    done = run_script(MIXED, 2)
    assert done.returncode != 0, done.stdout
    expected = "CudaBuildError: rank 1: torch is built for CUDA 13, CuPy for 12, NCCL for 13"
    assert done.stderr.count(expected) == 2, done.stderr
