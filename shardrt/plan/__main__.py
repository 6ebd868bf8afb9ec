"""What training would cost on a machine: memory, bytes, and time per step, from a dry run of the real runtime.

    shardrt-plan package.module:factory --ranks 512 --tp 8 --sheet h100 --batch 1 --sequence 8192 --param-dtype bfloat16
    shardrt-plan --preset llama3-405b --ranks 16384 --tp 8 --param-dtype bfloat16 --reduce-dtype float32
    shardrt-plan config.json --ranks 8 --sequence 4096      or a folder with it, or a name that transformers knows: no weights
    shardrt-plan sheets                             the hardware that is known
    shardrt-plan sheet STRESS.json > machine.toml   a sheet of a machine that `shardrt-stress --json --compute` has measured

The factory returns a module on the meta device, or such a module and a function step(model, job) that returns the loss of one
micro-batch. It takes no argument, or the job. No GPU, no MPI and no other rank takes part. Exit code 2: wrong input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..comm.program.options import Parser
from .question.options import plan_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"sheets": _sheets, "sheet": _sheet}
    try:
        return commands[given[0]](given[1:]) if given and given[0] in commands else _plan(given)
    except BrokenPipeError:  # nobody reads on, as in `shardrt-plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"shardrt-plan: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _plan(arguments: Sequence[str]) -> int:
    options = plan_parser(__doc__ or "").parse_args(arguments)
    from .question.planning import plan_of  # needs torch, as what follows a command line does, and help and errors do not
    from .question.report import as_json, lines

    plan = plan_of(options)
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print("\n".join(lines(plan)))
    return 0


def _sheets(arguments: Sequence[str]) -> int:
    Parser(prog="shardrt-plan sheets", description="List the hardware sheets that come with shardrt.").parse_args(arguments)
    from .machine.hardware import load_sheet, sheet_names

    names = sheet_names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {load_sheet(name).name}")
    return 0


def _sheet(arguments: Sequence[str]) -> int:
    parser = Parser(prog="shardrt-plan sheet", description="Print a hardware sheet made of measurements.")
    parser.add_argument("stress", type=Path, help="what shardrt-stress --json has written")
    options = parser.parse_args(arguments)
    from .run.measured import sheet_of_stress

    print(sheet_of_stress(options.stress), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
