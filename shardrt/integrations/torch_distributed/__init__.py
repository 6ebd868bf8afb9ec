"""`torch.distributed` over shardrt's communicators, for code that needs a process group: DDP, FSDP2, DTensor, pipelines.

    from shardrt.integrations import torch_distributed

    torch_distributed.init_process_group()      # in a job that mpirun or srun has started

From then on `torch.distributed` works as with gloo and NCCL. Its calls run on communicators of shardrt, with their checks,
watchdog, recorder and timelines. The runtime itself never needs a process group.
"""

from ... import torch_names as torch_names  # first: it logs what is gone from torch before that is missed

# isort: split
from .group import ProcessGroupShardrt
from .start import init_process_group, process_group

__all__ = ["ProcessGroupShardrt", "init_process_group", "process_group"]
