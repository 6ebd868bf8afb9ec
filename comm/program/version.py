"""The version of shardrt, and those of torch that it was tested with, here so that `comm` needs nothing of what lies above."""

__version__ = "0.2.0"
TESTED_TORCH = ("2.11", "2.13", "2.14", "2.15")  # README.md, setup.cfg and docs/getting_started.md have them too


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 13) of "2.13.0+cpu"."""
    return tuple(int(number) for number in version.split(".")[:2])
