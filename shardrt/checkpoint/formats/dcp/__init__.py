"""PyTorch's DCP format: a folder of files with tensors as torch.save writes them, and the metadata that says where they lie."""
