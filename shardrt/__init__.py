"""shardrt: a standalone runtime for fully sharded data parallel training."""

from typing import TYPE_CHECKING

from .comm.program.lazy import lazy
from .comm.program.version import __version__ as __version__

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import parallel as parallel
    from . import tensor as tensor
    from .exports import *
else:
    __getattr__, __dir__ = lazy(__name__)
