"""Merge the dumps of the ranks: `python -m shardrt.comm.recorder`."""

import sys

from .merge_dumps import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
