"""The names of the command line, of which `problem.py` makes what they stand for: `--help` needs no torch."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
)
DTYPES = (
    *("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8"),
    *("uint16", "uint32", "uint64", "uint8", "float8_e4m3fn", "float8_e5m2"),
)
OPS = ("sum", "avg", "min", "max", "product", "mulsum")
