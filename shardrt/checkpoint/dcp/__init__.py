"""The bytes of PyTorch's DCP format: items, and the metadata that says where they lie."""
