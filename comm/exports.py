"""The public names of `shardrt.comm`, which takes them from here when one of them is used first."""

from .core.calls import MismatchError, Op, PreMulSum, ReduceOp, RemoteError, Work
from .core.members import RankLost
from .core.nccl_policy import NcclPolicy
from .core.pool import Pool, new_pool
from .core.streams import Event, Stream, current_stream, new_stream
from .groups.communicator import Communicator
from .groups.mesh import DeviceMesh, current_mesh
from .startup.bootstrap import World, finalize, init, init_device_mesh, world
from .startup.hidden_variables import without_launcher_variables
from .startup.replacement import Coming, Replacement

__all__ = [
    "Coming",
    "Communicator",
    "DeviceMesh",
    "Event",
    "MismatchError",
    "NcclPolicy",
    "Op",
    "Pool",
    "PreMulSum",
    "RankLost",
    "ReduceOp",
    "RemoteError",
    "Replacement",
    "Stream",
    "Work",
    "World",
    "current_mesh",
    "current_stream",
    "finalize",
    "init",
    "init_device_mesh",
    "new_pool",
    "new_stream",
    "without_launcher_variables",
    "world",
]
