"""What `fully_shard` asks about parameters that are tensor-parallel already: torch.distributed.tensor.parallel.fsdp has it too.

A class of your own may stand in: `fully_shard(module, extensions=MyExtensions())`.
"""

from ..fsdp.params.tensor_parallel import DTensorExtensions, FSDPExtensions

__all__ = ["DTensorExtensions", "FSDPExtensions"]
