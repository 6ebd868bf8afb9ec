"""Models of transformers on the meta device: what they would read from their data, they do without."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ATTENTION = "shardrt_plan"  # scaled_dot_product_attention under another name, for which transformers makes no masks


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model is one of transformers, which is then imported already."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def fit_to_meta(model: Any) -> None:
    """Have a model of transformers attend without masks, which it makes by looking at positions, and keep no cache.

    Experts compute in one grouped matrix multiplication, as large as it is with any routing.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attend)
    model.set_attn_implementation(_ATTENTION)
    if hasattr(model.config, "num_local_experts") or hasattr(model.config, "num_experts"):
        model.set_experts_implementation("grouped_mm")
    model.config.use_cache = False


def _attend(module: Any, *tensors: Any, **options: Any) -> Any:
    """As `sdpa`, but for scores that it cannot change (Gemma 2's, GPT-OSS's): the model's plain operations, which run then."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward(module, *tensors, **options)
    return sys.modules[type(module).__module__].eager_attention_forward(module, *tensors, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of packages that others import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
