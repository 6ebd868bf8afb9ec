"""What carries the bytes: MPI for CPU tensors, NCCL for CUDA tensors."""
