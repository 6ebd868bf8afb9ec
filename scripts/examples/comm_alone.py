"""The communication layer without sharding: python -m shardrt.launch -n 2 comm_alone.py

Takes an even number of ranks, from 2. CPU tensors travel over MPI, CUDA tensors over NCCL.
"""

import torch

from shardrt.comm import DeviceMesh, ReduceOp, RemoteError, finalize, init, new_stream


def main() -> None:
    world = init()
    stream = new_stream(world.device, "comm")
    mesh = DeviceMesh(world.comm, (2, world.size // 2), ("pairs", "rest"))
    comm = mesh["pairs"].communicator("example")  # the ranks along one axis; one communicator for each role

    mine = torch.full((4,), float(comm.rank + 1), device=world.device)
    gathered = torch.empty(4 * comm.size, device=world.device)
    work = comm.all_gather(gathered, mine, stream=stream)  # enqueued on the stream
    work.wait(world.stream)  # orders world.stream after it; work.synchronize() would block

    largest = comm.empty(4, torch.float32)  # a buffer that collectives reach without a copy
    comm.all_reduce(largest, mine, ReduceOp.MAX, stream=stream).synchronize()

    other = torch.empty_like(mine)
    with comm.group():  # one launch: a send and a receive at once, in any order
        comm.send(mine, 1 - comm.rank, stream=stream)
        received = comm.recv(other, 1 - comm.rank, stream=stream)
    received.synchronize()

    if world.rank == 0:
        print(f"gathered {gathered.tolist()}, largest {largest.tolist()}, received {other.tolist()}", flush=True)

    try:
        with world.comm.agree():  # an exception on one rank is a RemoteError on all others
            if world.rank == 1:
                raise FileNotFoundError("config.json")
    except (FileNotFoundError, RemoteError) as error:
        if world.rank == 0:
            print(f"rank 0 caught {type(error).__name__}", flush=True)
    finalize()


if __name__ == "__main__":
    main()
