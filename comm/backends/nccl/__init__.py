"""NCCL through CuPy: the backend, its settings, its memory, and which CUDA the libraries are built for."""
