"""Classes of training frameworks that run on shardrt: `transformers`, `accelerate`, `lightning`.

Each module needs the package of its name and is imported on its own. The rest of shardrt uses none of them.
"""
