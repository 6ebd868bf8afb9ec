"""Print the padding of a Llama-3 transformer block in shardrt and FSDP2 as a Markdown table.

    python scripts/bench/padding.py [--itemsize 2] [--world-sizes 8 16 ...] [--down-dim 0 1]

"cut flat" is the share of the block's bytes in parameters whose shards end inside a row. The rows of
the down projection have another length than those of the other matrices; on shard dim 1 the same.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

from common import checkout  # noqa: F401  # before shardrt
from shardrt.fsdp.params.layout import ParamSpec, fsdp2_padding
from shardrt.fsdp.params.planner import plan

HIDDEN_FFN_KV = {"8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024)}


def block(model: str, *, itemsize: int, down_dim: int) -> list[ParamSpec]:
    hidden, ffn, kv = HIDDEN_FFN_KV[model]
    shapes = {
        "attention.wq": (hidden, hidden),
        "attention.wk": (kv, hidden),
        "attention.wv": (kv, hidden),
        "attention.wo": (hidden, hidden),
        "feed_forward.w1": (ffn, hidden),
        "feed_forward.w3": (ffn, hidden),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    specs = [ParamSpec(name, shape, itemsize) for name, shape in shapes.items()]
    return [*specs, ParamSpec("feed_forward.w2", (hidden, ffn), itemsize, dim=down_dim)]


def table_row(model: str, world_size: int, *, itemsize: int, down_dim: int) -> str:
    specs = block(model, itemsize=itemsize, down_dim=down_dim)
    layout = plan(specs, world_size)
    flat_nbytes = sum(param.spec.nbytes for param in layout.placed if param.flat)
    padded = (layout.padding_nbytes, fsdp2_padding(specs, world_size), flat_nbytes)
    ours, theirs, flat = (f"{100 * nbytes / layout.payload_nbytes:.2f} %" for nbytes in padded)
    return f"| {model} | {down_dim} | {world_size} | {ours} | {theirs} | {flat} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Padding of a Llama-3 block in shardrt and FSDP2.")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes per element")
    ranks = [2**power for power in range(3, 13)]
    parser.add_argument("--world-sizes", type=int, nargs="+", default=ranks, metavar="N")
    parser.add_argument("--down-dim", type=int, nargs="+", default=[0, 1], choices=(0, 1))
    options = parser.parse_args()
    print("| block | w2's shard dim | ranks | shardrt pads | FSDP2 pads | cut flat |")
    print("|---|--:|--:|--:|--:|--:|")
    for model in HIDDEN_FFN_KV:
        for down_dim in options.down_dim:
            for world_size in options.world_sizes:
                print(table_row(model, world_size, itemsize=options.itemsize, down_dim=down_dim))


if __name__ == "__main__":
    main()
