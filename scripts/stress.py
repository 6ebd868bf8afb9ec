"""Load, check and break the communication layer: `shardrt-stress`, from a checkout.

mpirun -n 4 python scripts/stress.py -b 1K -e 64M --collectives all_reduce,all_gather
"""

import sys

import checkout  # noqa: F401  # before shardrt
from shardrt.stress.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
