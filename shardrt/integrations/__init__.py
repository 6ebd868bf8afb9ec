"""Classes that let training frameworks run on shardrt: `transformers`, `accelerate`, `lightning`; functions for `torchao`.

Each module needs the package of its name and must be imported explicitly. The rest of shardrt imports none of them.
"""
