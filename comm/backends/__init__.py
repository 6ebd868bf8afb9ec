"""The backends: MPI for CPU tensors, NCCL for CUDA tensors."""
