"""What training will cost: memory, bytes and time per step, forecast without the machine."""

from typing import TYPE_CHECKING

from ..comm.program.lazy import lazy

if TYPE_CHECKING:
    from .exports import *
else:
    __getattr__, __dir__ = lazy(__name__)
