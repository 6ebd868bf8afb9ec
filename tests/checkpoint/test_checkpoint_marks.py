"""The marks of a save in its files: what is of another save, or the beginning of one and the end of another, is refused."""

from __future__ import annotations

import base64
import io
import lzma
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardrt
from checkpoints import shared_folder, stock_load
from ranks import on_ranks
from shardrt.checkpoint import CheckpointError, load, save
from shardrt.checkpoint.__main__ import main
from shardrt.checkpoint.disk.files import METADATA
from shardrt.checkpoint.formats.dcp.marks import own_id
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.comm import World


def state(world: World, value: float) -> dict[str, Any]:
    """Something small and something large on each rank, and an object of rank 0."""
    rows = torch.full((7 * world.size, 5), value)
    large = torch.full((world.size, 20_000), value)
    return {
        "rows": shardrt.distribute_tensor(rows, world.mesh, [shardrt.Shard(0)]),
        "large": shardrt.distribute_tensor(large, world.mesh, [shardrt.Shard(0)]),
        "value": value,
    }


def values(found: dict[str, Any]) -> set[float]:
    return {found["value"], *found["rows"].to_local().unique().tolist(), *found["large"].to_local().unique().tolist()}


def id_of(folder: Path) -> str:
    found = own_id(read_stored(folder).save_id)
    assert found is not None
    return found


@on_ranks(1, 2, 3)
def test_a_file_of_another_save_is_refused_by_name(world: World) -> None:
    with shared_folder(world) as folder:
        for name, value in (("a", 1.0), ("b", 2.0)):
            save(folder / name, state(world, value))
        ids = [id_of(folder / name) for name in ("a", "b")]
        assert ids[0] != ids[1]
        assert world.comm.exchange(ids) == [ids] * world.size
        for file in sorted(os.listdir(folder / "a")):
            world.barrier()
            if world.rank == 0:
                shutil.copytree(folder / "a", folder / file)
                shutil.copy(folder / "b" / file, folder / file / file)
            world.barrier()
            foreign = r"__\d_0.distcp" if file == METADATA else file
            has, expected = ids if file == METADATA else reversed(ids)
            message = rf"{file}/{foreign}' begins as '{foreign}' of save {has}; by .metadata, expected .* of save {expected}"
            with pytest.raises(CheckpointError, match=message):
                load(folder / file, state(world, 0.0))
            if world.rank == 0:
                with redirect_stdout(io.StringIO()) as out:
                    assert main(["verify", str(folder / file)]) == 1
                assert re.search(message, out.getvalue())
        world.barrier()
        loaded = state(world, 0.0)
        load(folder / "b", loaded)
        assert values(loaded) == {2.0}


def cuts(nbytes: int) -> Iterator[int]:
    """After how many bytes a copy may be interrupted: at the marks, in items, and at their edges."""
    yield from (1, 63, 64, 65, 4096, nbytes // 2, nbytes - 65, nbytes - 64, nbytes - 63, nbytes - 1, nbytes)


@on_ranks(2)
def test_a_copy_in_place_that_was_interrupted_is_refused(world: World) -> None:
    """As by `rsync --inplace`, over a file of the same length, of a shorter one, and of a longer one."""
    with shared_folder(world) as folder:
        for name, value in (("a", 1.0), ("b", 2.0)):
            save(folder / name, state(world, value))
        file = "__1_0.distcp"
        new, old = ((folder / name / file).read_bytes() for name in ("a", "b"))
        for under in (old, old[:-4096], old + old[-4096:]):
            for cut in cuts(len(new)):
                world.barrier()
                if world.rank == 0:
                    (folder / "a" / file).write_bytes(new[:cut] + under[cut:])
                world.barrier()
                loaded = state(world, 0.0)
                if new[:cut] + under[cut:] == new:
                    load(folder / "a", loaded)
                    assert values(loaded) == {1.0}
                else:
                    with pytest.raises(CheckpointError, match=rf"a/{file}' (begins|ends) .*interrupted copy"):
                        load(folder / "a", loaded)


@on_ranks(2)
def test_the_marks_cost_two_reads_of_each_file(world: World) -> None:
    with shared_folder(world) as folder:
        save(folder / "a", state(world, 1.0))
        preadv, reads = os.preadv, list[tuple[int, int]]()

        def counted(fd: int, buffers: Any, offset: int) -> int:
            reads.append((offset, sum(map(len, buffers))))
            return preadv(fd, buffers, offset)

        with mock.patch.object(os, "preadv", counted):
            load(folder / "a", state(world, 0.0))
        ends = [(folder / "a" / f"__{rank}_0.distcp").stat().st_size - 64 for rank in range(2)]
        files = 2 if world.rank == 1 else 1  # the object is in the file of rank 0
        assert sum(read == (0, 64) for read in reads) == files
        assert sum(any((end, 64) == read for end in set(ends)) for read in reads) == files


def test_inspect_shows_the_id_and_convert_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.arange(5.0), "text": "abc"}, tmp_path / "saved.pt")
    for name in ("a", "b"):
        assert main(["convert", str(tmp_path / "saved.pt"), str(tmp_path / name), "--to", "dcp"]) == 0
        assert main(["inspect", str(tmp_path / name)]) == 0
        assert f"\nsave {id_of(tmp_path / name)}\n" in capsys.readouterr().out
        assert main(["verify", str(tmp_path / name)]) == 0
    assert id_of(tmp_path / "a") != id_of(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "__0_0.distcp", tmp_path / "a")
    assert main(["verify", str(tmp_path / "a")]) == 1


# ---------------------------------------------------------------------- earlier versions


def write_old(folder: Path) -> Path:
    """What a version without marks wrote of OLD_STATE, on two ranks."""
    data = memoryview(lzma.decompress(base64.b85decode("".join(OLD))))
    folder.mkdir()
    while data:
        name, data = _taken(data, 2)
        content, data = _taken(data, 4)
        (folder / bytes(name).decode()).write_bytes(content)
    return folder


def _taken(data: memoryview, width: int) -> tuple[memoryview, memoryview]:
    """What comes after its length, and the rest."""
    nbytes = int.from_bytes(data[:width], "little")
    return data[width : width + nbytes], data[width + nbytes :]


def test_a_checkpoint_of_an_earlier_version_has_no_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_old(tmp_path / "old")
    assert read_stored(old).save_id == "shardrt-1"
    assert main(["verify", str(old)]) == main(["inspect", str(old)]) == 0
    assert re.search(r"dcp, written by shardrt\n.*\n.*\nwritten by ranks 0-1", capsys.readouterr().out)
    assert main(["convert", str(old), str(tmp_path / "new.pt"), "--to", "torch"]) == 0
    found, stock = torch.load(tmp_path / "new.pt"), stock_load(old)
    for name, expected in OLD_STATE.items():
        assert torch.equal(found[name], expected)
        assert torch.equal(stock[name], expected)
    assert (found["text"], found["list"]) == ("abc", [1, 2.5])


def test_an_earlier_version_beside_files_of_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_old(tmp_path / "old")
    assert main(["convert", str(old), str(tmp_path / "new"), "--to", "dcp"]) == 0
    save_id = id_of(tmp_path / "new")
    shutil.copytree(old, tmp_path / "mixed")
    shutil.copy(tmp_path / "new" / "__0_0.distcp", tmp_path / "mixed")
    assert main(["verify", str(tmp_path / "mixed")]) == 1
    found = f"begins as '__0_0.distcp' of save {save_id}; by .metadata, expected without the mark of a save"
    assert found in capsys.readouterr().out
    shutil.copy(old / "__0_0.distcp", tmp_path / "new")
    assert main(["verify", str(tmp_path / "new")]) == 1
    found = f"begins without the mark of a save; by .metadata, expected as '__0_0.distcp' of save {save_id}"
    assert found in capsys.readouterr().out


@on_ranks(1, 2)
def test_an_earlier_version_is_loaded(world: World) -> None:
    with shared_folder(world) as folder:
        if world.rank == 0:
            write_old(folder / "old")
        world.barrier()
        loaded: dict[str, Any] = {name: torch.zeros_like(value) for name, value in OLD_STATE.items()}
        load(folder / "old", {**loaded, "text": "", "list": [0, 0.0]})
        for name, expected in OLD_STATE.items():
            assert torch.equal(loaded[name], expected)


OLD_STATE = {
    "w": torch.arange(35.0).view(7, 5),
    "big": torch.full((6000,), 3, dtype=torch.int32),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
OLD = (
    "{Wp48S^xk9=GL@E0stWa8~^|S5YJf5;DkR1)Lj4sfCEh6$trkb(~}%ZUS5Hm#u*lUVWVn`&&GH9-bKcc|7V`68`}TnT_VJjov%C?4ptE7Ew;r`0v"
    "J6_w88j+6sW&qh!6!$%Hjdlg2m}&FQzbU_wgNdsF`t2?$wivnx&p1<r>wUY>K_CRA<$`vo_W1M?!yqDE8mh#$pv}7UjR*m2Xa9LgV0QzyJp>r1P{"
    "a)RulApov9*g-Mq<U&SwsLmA&<Pa8t!b5dFK);{{Dm&ckpW+P?iP05-WKdF(vm9x&?d1@v9M)_Lzj#$<x5rHpDl&<Z?700B-YSDP;WlB-nEd6U@F"
    "$NH`epsRl5Da&J)elh7R*RpeuCmY$zT8!T(B_K$)}cbtM<x}#1RUSvzU8Q<6fV!v#Ql}lNes7_g2rZwkr6xzm6d85*-cx{dQ-s`Xw*#Ht#Ae3mVY"
    "7h?bA5i`*$j$#n#iGEYtBPQ{h$OG^6H=sS6HyvNCt#NfX6frQIPBSa)d}Cm;&69W4uL_IwbD=gi+*O1Tjc%R)2uFsfB7-qIr=MD@3JBXjRtT%y@1"
    "F`yoXhBg%t>`~j`j0td=#_e7NijndF32MV#M6|cFsU-b^>i)VI3M6m3E1>r!On_P5>Gvay$}ub;PVdOlp^UXINg-`iuJ%YT?(rZ`=TQ4BS3HEmSH"
    "V29w%s7jObw0eJ=QuNgw0DzV6+vTOM@V?`z7XL0=2;vdz#NI-n*%MsSju>LM^mdHf8Ao>Lj9&=&8_}Y8yd)&7`@WfBj`5M|)js%Og(tisxOkG|KE"
    "Qp&Ou<b?q=7rzxVxrT{%p%r$cZE60LhO`Igo?tu~{Okrs}%K==dI+&(r={Ai0{Qj#a7rC9Pi?@b=uyF})6e3M@FvOHW^0UEO2P=w{QtMJ|G=iDX!"
    "F;|1vY7Z6m26GuwcXtnx#Yh^so9g_@iMqGE^VbtifH^|Z0J)!$kom;7ZMOIV=g1CTNRH+dUJ|@zQx1h?RGbq3Rs{G<-n^!Dz67{M4Y^yeF>lWf$z"
    "xbz~Da3G9n6=+nOZj64J0#VF6{K094A<d<|C`CMY@mthh9QeF2yxHdMQ9RD$?p`pp>y55;6K#z$gk>Ygl`nP`S2J5eQb+;7QQsnWZl=bdsF-u$lr"
    "7}vXeO9KBiJ!bGB7(8demD}?+RrRqJmuKjIYh`XWp?7ibqxrVbW-cfseZjKNzpHIdwMLwvS9zfz_q&_cn<tv--N3X_m}%=u0rCen7Pfjx3Ml7jV#"
    "VHRpm8!NQfQ-jiZFLdOoxIz@<YQLQpW45v)UGRLCJ+H7OM~f3K1(T0UqneX1uR=MraL9t-nY5*g!U)#>|$5pm}mQ&0>;zQ^<7?6ca<MN`WDIhUC~"
    "Let?T`N3bcwK=53R=C{J;6-N+drnT9g^ezVGHfCW_p73R`Az9XhuoIEj#Z0;z>Z80|YZf7JZbX;?pY!F5h?v_gJ}31EVfzlf+tWq*kV^AaxMu*2M"
    "A%$33}|#mNW{=S!_jaqZe+`6pl`E$>WE_ru@TQknou41$>ab)gUm(~NAtn^zj71iTGY^b5abI$HhG1?5HXcl<tTW!NHE2#<>sLkMc{n#conai1FY"
    "w@yc)%l&lPbiQTq<gXx#9j{|!INUX{BE;XPmR1)e5;kyX$4rw^l*s;}nv+IM?~Behu<{p|whk`96d#5^8{z8l~q6_MOu^>#Bqd0Zsr7dJzeGYT>&"
    "L|zx{|GE1;$mis~f`B9=tNe!1Z5l93|L0W|N*ghE4q&s)+4Pjv@MbXzLi;Ao)dkm}Spzh0L9v&uqTL<8Ju2*BgMaxP9*dkt7q1x)pw{Ph&~eo3hg"
    "KHY87>1=LG}7fgrY}fz#Hxj-qt9LVDH6sJRU_LJ9JdRGkc-}F~H7|n>!D6hU|6TAsRfv5>>RngV7WOrXnMT>%zUw%}nh?83K!k9@cg4P3a&4+OZB"
    "HvFG5l)g$X9c?1o3IfQD2(K4&t&4tQJti%RKiEZ<I9R?c{3zB%IT95uQ(kXW%V@poIl$4OvkP~}FAow=pf2+wA&aWC*8pxoa;G)vG-i{>dAVI7hd"
    "%c`{WQgwD?9nb&j;AW3l8~;P-UV5iB+Gkl<pexFqs)`0r*`ku0s@SX!A|IiW8)qn#1B*dx!SdAWhOAI+F(`*Z{qO8O6Yu6b~tmctvWrio<PnVKZ6"
    "myWPf6yQD6f1plgXqrt`A)YWD<EJ)I{1kk%03#!(XO#7Gm+Cu4h1s^MiZb>p_8Z`$ShPDK^5z&FNq5tl0vY7zuZAapF(;?^u8H29OizI$@yEi>Cy"
    "VokD4rx6zxm{MPS*Kh}MKBLr;yT`##a+(}1fzp^SD!E;ZHjDSGdYRoWGM67SDO0eufKSABGB2<;Yji=v$1lcn<Ei~EeKwGafV`_r?UkwX{Nljtc<"
    "l;OIgBgbae{M!@QhoysJidWZD!k5H+}|swKkdJh{=BWq2>u;iA^xjI~hslM9!^4WyBqQL<4xZk3^=)(H5DqV)Yio+4ev@EnrJ^L5tn;VxW_0YAV$"
    "B2>3Ky{r`VI#dfM7!^X$6*#)o7+}D<1vcxgv07uOmRs+F2U=abF9keiz*A@z?Gx?dqz(*H0iH{&pqxkLs+y>v44^EMk00Hn1z=#3>shrCHvBYQl0"
    "ssI200dcD"
)
