"""shardrt-timeline merge FOLDER-OR-FILES... -o MERGED.json

Exit code: 0; 1 if a file was left out; 2 if none remained, or for wrong arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..comm.program.options import Parser


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = Parser(prog="shardrt-timeline", description="Timelines of shardrt.Timeline.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merging = commands.add_parser("merge", help="one file of several ranks, or of a run and its forecast, for Perfetto")
    merging.add_argument("paths", type=Path, nargs="+", metavar="FOLDER-OR-FILE", help="of a folder, all its *.json")
    merging.add_argument("-o", "--out", type=Path, required=True, metavar="MERGED.json")
    options = parser.parse_args(arguments)
    from .merge import merge  # needs torch, and help and errors do not

    try:
        left_out = merge(options.paths, options.out, lambda line: print(line, file=sys.stderr))
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}: open it in https://ui.perfetto.dev")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
