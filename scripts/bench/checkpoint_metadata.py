"""The metadata of a checkpoint of very many ranks, made without them: what rank 0 does in a save once all have agreed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.checkpoint_workers import status_mb
from shardrt.checkpoint.formats.dcp.marks import new_save_id
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.dcp.metadata_writer import ending
from shardrt.checkpoint.saving.assignment import Agreed
from shardrt.checkpoint.saving.descriptions import Described, Description, Grid
from shardrt.checkpoint.saving.plan import write_metadata
from shardrt.fsdp.params.layout import ParamSpec
from shardrt.fsdp.params.param import placement_of
from shardrt.fsdp.params.planner import plan

HIDDEN, FFN, KV, HEAD = 16384, 53248, 1024, 128
BLOCK = {  # as in Llama-3 405B, and a norm of queries
    "attention.wq": (HIDDEN, HIDDEN),
    "attention.wk": (KV, HIDDEN),
    "attention.wv": (KV, HIDDEN),
    "attention.wo": (HIDDEN, HIDDEN),
    "attention.q_norm": (HEAD,),
    "feed_forward.w1": (FFN, HIDDEN),
    "feed_forward.w3": (FFN, HIDDEN),
    "feed_forward.w2": (HIDDEN, FFN),
    "attention_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What was made. Times in seconds, memory in MiB."""

    ranks: int
    tensors: int
    chunks: int
    nbytes: int  # of .metadata
    write_s: float  # until it is on the disk
    grown_mb: float  # memory at the peak, less that before
    open_s: float  # to read the names
    tensor_s: float  # to read the chunks of one tensor


def simulate(ranks: int, blocks: int, folder: Path) -> Simulated:
    """Blocks of ten bfloat16 tensors, each block a group over all ranks. The layout of a block is planned before."""
    torch.set_num_threads(1)
    description = describe_model(ranks, blocks)
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    with open(folder / ".metadata", "wb") as file:
        write_metadata(file, Agreed.of_equal(description, ranks))
        file.write(ending(new_save_id()))
        file.flush()
        os.fsync(file.fileno())
    write_s, grown_mb = time.perf_counter() - start, status_mb("VmHWM") - before
    start = time.perf_counter()
    stored = read_stored(folder)
    open_s = time.perf_counter() - start
    chunks = sum(len(stored.tensors[f"model.layers.0.{name}"].chunks) for name in BLOCK) * blocks
    start = time.perf_counter()
    read = stored.tensors[f"model.layers.{blocks - 1}.feed_forward.w1"].chunks
    tensor_s = time.perf_counter() - start
    assert read, "a tensor has chunks"
    nbytes = (folder / ".metadata").stat().st_size
    return Simulated(ranks, len(description), chunks, nbytes, write_s, grown_mb, open_s, tensor_s)


def describe_model(ranks: int, blocks: int) -> Description:
    grid = Grid.of((ranks,), range(ranks))
    layout = plan([ParamSpec(name, shape, torch.bfloat16.itemsize) for name, shape in BLOCK.items()], ranks)
    placements = {param.spec.name: placement_of(index, layout) for index, param in enumerate(layout.placed)}
    return tuple(
        Described(f"model.{key}", ("model", key), torch.bfloat16, shape, 0, grid, (placements[name],))
        for block in range(blocks)
        for name, shape in BLOCK.items()
        for key in [f"layers.{block}.{name}"]
    )
