"""Expert parallelism of models of transformers, by a plan, with each of its implementations of experts."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ranks import on_ranks
from shardrt.comm import World
from shardrt.parallel import expert_load, update_expert_bias
from toys_ep import VOCAB, batch_of, divide, mesh_of, train_beside_one_process

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": None,
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen() -> Any:
    """With an expert that all tokens share, behind a gate of its own."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes: Any = {"num_experts": 8, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **sizes))


def deepseek() -> nn.Module:
    """A dense layer, then one with groups of experts, a shared one, and a bias that chooses."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts: Any = {"n_routed_experts": 4, "moe_intermediate_size": 12, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    heads: Any = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **experts, **heads, first_k_dense_replace=1))


MODELS = {"mixtral": mixtral, "qwen": qwen, "deepseek": deepseek}


def logits_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the logits: the model's own loss is in float32."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@on_ranks(2, 4)
@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_model_trains_as_on_one_process(world: World, name: str, implementation: str) -> None:
    """In float64; torch multiplies groups in float32 at most."""
    whole: Any = MODELS[name]()
    whole.set_experts_implementation(implementation)
    single = implementation == "grouped_mm"
    whole = whole if single else whole.double()
    mesh = mesh_of(world, 2)
    train_beside_one_process(
        world,
        mesh,
        whole,
        lambda model: divide(model, mesh, "model.layers.*.mlp.experts"),
        loss=logits_loss,
        clip=0.5,
        tolerance=2e-4 if single else 1e-12,
    )


@on_ranks(2)
def test_gradient_checkpointing_of_a_model(world: World) -> None:
    """The model's own: each layer's exchanges come again in the backward, on all ranks alike."""
    mesh, whole = mesh_of(world, 2), qwen().double().train()
    whole.set_experts_implementation("eager")

    def divided(model: Any) -> nn.Module:
        model.activation_checkpointing_enable({"use_reentrant": False})
        return divide(model, mesh, "model.layers.*.mlp.experts")

    train_beside_one_process(world, mesh, whole, divided, loss=logits_loss)


@on_ranks(2)
def test_loads_become_even(world: World) -> None:
    """The bias of DeepSeek-V3, raised for experts with less than the mean, evens out the loads; equal on all ranks."""
    mesh = mesh_of(world, 2)
    model: Any = divide(deepseek(), mesh, "model.layers.*.mlp.experts")
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.copy_(torch.tensor([0.2, 0.1, -0.1, -0.2]))
    spreads = []
    for _ in range(12):
        logits_loss(model, batch_of(0, world.rank)).backward()
        (load,) = expert_load(model, mesh.flatten()).values()
        assert load.sum() == 2 * sum(batch_of(0, rank)[:, 1:].numel() for rank in range(2))
        update_expert_bias(router.e_score_correction_bias, load, rate=0.05)
        spreads.append((load.max() - load.min()).item())
    assert min(spreads[3:]) < spreads[0] / 2
    assert world.comm.differing(router.e_score_correction_bias.tolist()) is None
