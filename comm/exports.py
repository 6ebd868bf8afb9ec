"""The public names of `shardrt.comm`, which takes them from here when one of them is used first."""

from .bootstrap import World, finalize, init, init_device_mesh, world
from .calls import MismatchError, Op, PreMulSum, ReduceOp, RemoteError, Work
from .communicator import Communicator
from .environment import without_launcher_variables
from .members import RankLost
from .mesh import DeviceMesh, current_mesh
from .nccl_policy import NcclPolicy
from .pool import Pool, new_pool
from .replacement import Coming, Replacement
from .streams import Event, Stream, current_stream, new_stream

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
