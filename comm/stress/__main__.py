"""shardrt-stress: a sweep or a soak on the ranks of this job, or faults in jobs of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank."""
    options = parse(arguments)
    from .run import run  # needs torch, and help and errors do not

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
