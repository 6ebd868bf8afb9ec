"""Known models, by the numbers of their publications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A model. kind: the prefix of its classes in transformers.   sequence: the default.   context: the longest sequence."""

    kind: str
    head: str  # the suffix of the model's class
    config: Mapping[str, Any]
    sequence: int
    context: int
    source: str


def _llama3(layers: int, width: int, inner: int, heads: int) -> Preset:
    """A Llama 3. The sizes are those of table 3 of its publication."""
    config = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }
    return Preset("Llama", "ForCausalLM", config, 8_192, 131_072, "arXiv:2407.21783")


_MIXTRAL = {
    "num_hidden_layers": 32,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
}
_GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1_024, "vocab_size": 50_257}

PRESETS = {
    "llama3-8b": _llama3(32, 4_096, 14_336, 32),
    "llama3-70b": _llama3(80, 8_192, 28_672, 64),
    "llama3-405b": _llama3(126, 16_384, 53_248, 128),
    "mixtral-8x7b": Preset("Mixtral", "ForCausalLM", _MIXTRAL, 4_096, 32_768, "arXiv:2401.04088"),
    "gpt2": Preset("GPT2", "LMHeadModel", _GPT2, 1_024, 1_024, "Radford et al. 2019, table 2"),
}
