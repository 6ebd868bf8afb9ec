"""Where dumps go, whatever other users of the machine have planted there; and the merge, which reads whatever it is given."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranks import refused
from shardrt.comm.recorder.dumps import DumpFolder
from shardrt.comm.recorder.merge_dumps import main, merge, parse
from shardrt.comm.recorder.recorder import Recorder

JOB = "20260101-000000-1-0af9"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, to which everyone can write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def base_of(temporary: Path) -> Path:
    return temporary / f"shardrt-dumps-{os.geteuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def silent(line: str) -> None:
    raise AssertionError(line)


# ---------------------------------------------------------------------- the folder


def test_only_the_user_can_read_dumps(temporary: Path) -> None:
    base_of(temporary).mkdir(0o777)
    base_of(temporary).chmod(0o777)  # as an earlier version or a careless user made it
    path = DumpFolder(None, JOB, silent).write("rank-0.json", "{}")
    assert path == base_of(temporary) / JOB / "rank-0.json"
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    assert DumpFolder(None, JOB, silent).write("rank-0.json", "again \udce9").read_text() == "again \\udce9"
    assert [entry.name for entry in path.parent.iterdir()] == ["rank-0.json"], "nothing unfinished stays"


@pytest.mark.parametrize("what", ["link", "link beneath", "file", "foreign", "foreign beneath"])
def test_folders_that_others_have_planted_are_refused(temporary: Path, what: str) -> None:
    """The dump goes to a fresh folder, and a line says so; nothing is written where a link points."""
    if what.startswith("foreign") and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    planted = base_of(temporary)
    if what.endswith("beneath"):
        planted.mkdir(0o700)
        planted /= JOB
    if what.startswith("link"):
        planted.symlink_to(elsewhere)
    elif what == "file":
        planted.write_text("")
    else:
        planted.mkdir()
        os.chown(planted, 12345, 12345)
    said: list[str] = []
    folder = DumpFolder(None, JOB, said.append)
    path = folder.write("rank-0.json", "{}")
    assert path.parent == folder.path != planted
    assert (path.read_text(), mode(path.parent), path.parent.stat().st_uid) == ("{}", 0o700, os.geteuid())
    assert list(elsewhere.iterdir()) == []
    assert len(said) == 1
    assert f"dumps of this rank go to {folder.path}, not to {base_of(temporary) / JOB}: " in said[0]
    assert folder.write("rank-1.json", "{}").parent == folder.path, "the folder stays"
    assert len(said) == 1


@pytest.mark.parametrize("chosen", [False, True])
def test_links_in_the_place_of_a_dump_are_replaced(temporary: Path, chosen: bool) -> None:
    """Also in the user's folder (SHARDRT_DUMP), which may be one that others can write to."""
    precious = temporary / "precious"
    precious.write_text("keep me")
    folder = DumpFolder(temporary / "mine" / "deep" if chosen else None, JOB, silent)
    folder.path.mkdir(parents=True)
    (folder.path / "rank-0.json").symlink_to(precious)
    os.link(precious, folder.path / "rank-1.json")
    for rank in range(2):
        path = folder.write(f"rank-{rank}.json", "{}")
        assert (path.read_text(), path.is_symlink(), mode(path)) == ("{}", False, 0o600)
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize(("apart_s", "kept"), [(3600, 50), (1571, 55)], ids=["fifty", "a day"])
def test_old_dumps_are_removed(temporary: Path, apart_s: int, kept: int) -> None:
    """After a week, or after a day if there are more than fifty; links, what they point to, and what is not a job's stay."""
    base, precious = base_of(temporary), temporary / "precious"
    base.mkdir(0o700)
    precious.mkdir()
    (precious / "file").write_text("keep me")
    jobs = [base / f"20250101-000000-{number}{'-12ab' * (number % 2)}" for number in range(60)]
    now = time.time()
    for age, job in enumerate(jobs):
        job.mkdir()
        (job / "rank-0.json").write_text("{}")
        (job / "link").symlink_to(precious)
        os.utime(job, (now - age * apart_s, now - age * apart_s))
    os.utime(jobs[3], (now - 8 * 24 * 3600,) * 2)
    (base / "20250101-000000-99").symlink_to(precious)
    (base / "notes").mkdir()
    os.utime(base / "notes", (0, 0))
    DumpFolder(None, JOB, silent).write("rank-0.json", "{}")
    left = {entry.name for entry in base.iterdir()}
    assert {JOB, "notes", "20250101-000000-99"} <= left
    assert [number for number, job in enumerate(jobs) if job.name in left] == [0, 1, 2, *range(4, kept)]
    assert (precious / "file").read_text() == "keep me"


def test_a_dump_has_the_reason_of_the_one_that_it_replaces(temporary: Path) -> None:
    recorder = Recorder(0, 1, DumpFolder(None, JOB, silent), 10)
    assert recorder.dump(why="raised") == recorder.dump(why="another rank reports")
    assert json.loads(recorder.dump(temporary / "asked.json").read_text())["why"] == "requested"
    assert json.loads(recorder.dump(why="again").read_text())["why"] == "raised\nanother rank reports\nagain"


def test_no_dump_can_be_written(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError, which the callers report; also where there is no folder for temporary files at all."""
    (temporary / "file").write_text("")
    refused("file", lambda: DumpFolder(temporary / "file", JOB, silent).write("rank-0.json", "{}"), OSError)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert DumpFolder(None, JOB, silent).path.parts[:2] == ("/", "tmp")


# ---------------------------------------------------------------------- merging


def call(number: int, what: str, ended: float = 2.0, comm: str = "dp") -> dict[str, object]:
    return {"comm": comm, "ranks": [0, 1, 2, 3], "number": number, "what": what, "started": 1.0, "ended": ended}


def dump(rank: int, **values: object) -> dict[str, object]:
    what = "all_gather bfloat16 4096" if rank == 3 else "reduce_scatter bfloat16 4096 sum"
    calls = [call(811, "barrier"), call(812, what, ended=0.0)]
    return {"rank": rank, "size": 4, "job": JOB, "time": 5.0, "notes": [], "calls": calls, **values}


def merged(*dumps: dict[str, object]) -> str:
    return merge([parse(json.dumps(dump).encode()) for dump in dumps])


STUCK = (
    "! 'dp' of ranks 0, 1, 2, 3: rank 3 is at #812 all_gather bfloat16 4096, under way; "
    "all others at #812 reduce_scatter bfloat16 4096 sum, under way"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the dumps of four ranks."""
    for rank in range(4):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(dump(rank)))
    return tmp_path


def test_merge_names_who_is_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merged(*map(dump, (2, 0, 3, 1))) == STUCK
    assert merged(dump(0), dump(2), dump(3)).splitlines()[0] == "no dump of rank 1"
    together = [dump(rank, calls=[call(5, "barrier")], notes=[[1.0, "free blocks.0"]]) for rank in range(4)]
    expected = ["  'dp' of ranks 0, 1, 2, 3: all at #5 barrier, done", "  last noted by ranks 0, 1, 2, 3: free blocks.0"]
    assert merged(*together).splitlines() == expected
    assert main(["merge", str(folder)]) == 0
    assert capsys.readouterr() == (STUCK + "\n", "")
    refused("2", lambda: main(["merge"]), SystemExit)


def test_what_is_no_dump_is_named_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.dumps(dump(0))
    wrong = {
        "a.json": whole[:-10],
        "b.json": "[]",
        "c.json": "\udcff\udcfe",
        "d.json": "[" * 100_000,
        "e.json": json.dumps(dump(7)),
        "f.json": json.dumps(dump(0, size=2, time=4.0)),
        "g.json": json.dumps(dump(0, calls=[{"comm": "dp"}])),
        "h.json": "1" * 10_000,
        "h2.json": json.dumps(dump(0, time=float("nan"))),
        "i.json": json.dumps(dump(0, notes=[3])),
    }
    for name, text in wrong.items():
        (folder / name).write_text(text, errors="surrogateescape")
    os.mkfifo(folder / "j.json")
    (folder / "k.json").mkdir()
    (folder / "l.json").symlink_to("nowhere")
    names = [*wrong, "j.json", "k.json", "l.json"]
    assert main(["merge", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == STUCK + "\n", "the good ones count"
    assert sorted(line.split(":")[0] for line in err.splitlines()) == [str(folder / name) for name in names]
    assert err.count(": left out: ") == len(names)
    assert main(["merge", str(folder / "b.json"), str(folder / "none")]) == 2
    assert "no dump (*.json) in" in capsys.readouterr().err


def test_the_newest_dump_of_a_rank_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same dump twice does not stand for two ranks."""
    (folder / "rank-2.json").unlink()
    (folder / "old.json").write_text(json.dumps(dump(1, time=4.0, calls=[])))
    (folder / "copy.json").write_text(json.dumps(dump(0)))
    assert main(["merge", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "no dump of rank 2"
    assert "rank 3 is at #812 all_gather bfloat16 4096, under way; ranks 0, 1 are at #812 reduce_scatter" in out
    assert f"{folder / 'old.json'}: {folder / 'rank-1.json'} is the newer dump of rank 1, and counts" in err
    assert "dump of rank 0, and counts" in err


def test_the_newest_job_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder that jobs share, the dump of an earlier one does not stand for a rank that left none."""
    for rank in (0, 2):
        (folder / f"rank-{rank}.json").write_text(json.dumps(dump(rank, job="new", time=6.0)))
    assert main(["merge", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "no dump of ranks 1, 3"
    assert [line.split("rank-")[1] for line in err.splitlines()] == [
        f"{rank}.json: left out: of job {JOB} of 4 ranks; the newest is new of 4 ranks" for rank in (1, 3)
    ]
    (folder / "rank-0.json").write_text(json.dumps(dump(0, job="newest", size=1, time=7.0)))
    assert main(["merge", str(folder)]) == 1
    assert "no dump" not in capsys.readouterr().out


def test_a_claimed_size_costs_nothing() -> None:
    begin = time.monotonic()
    assert merged(dump(0, size=2 * 10**9), dump(5, size=2 * 10**9)).startswith("no dump of ranks 1 to 4, 6 to 1999999999\n")
    assert time.monotonic() - begin < 10.0


def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an escape sequence, a forged line, and a change of the direction of writing; also in names of files."""
    evil = "x\x1b[2J\ny\u202e\u009b1m"
    calls = [call(1, evil, comm=evil)]
    (tmp_path / "good.json").write_text(json.dumps(dump(0, size=1, calls=calls, notes=[[1.0, evil]])))
    (tmp_path / "bad\x1b[2J.json").write_text("?")
    assert main(["merge", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.replace("\n", "").isprintable()
    assert err.replace("\n", "").isprintable()
    assert out.count("x\\x1b[2J\\ny\\u202e\\x9b1m") == 3
    assert len(out.splitlines()) == 2
    assert "bad\\x1b[2J.json: left out" in err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from([*dump(0), *call(0, "")]), children),
    max_leaves=8,
)


@given(name=st.sampled_from([*dump(0)]), value=JSON)
def test_any_field_may_be_anything(name: str, value: object) -> None:
    """It is a dump that can be merged, or a ValueError."""
    try:
        found = parse(json.dumps({**dump(0), name: value}).encode())
    except ValueError:
        return
    assert merge([found]).replace("\n", "").isprintable()


@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011, whatever it says
        parse(text.encode())
