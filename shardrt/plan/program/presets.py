"""Makes known models of the classes of transformers, without a download."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...parallel import (
    ColwiseParallel,
    ExpertParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from ...tensor.placement.placement import Replicate, Shard
from .configurations import importing_transformers
from .factory import Step, shard_model, token_loss
from .hugging_face import fit_to_meta
from .job import Job, PlanError
from .known_models import PRESETS, Preset
from .pipeline import blocks_of_stage


def preset_factory(name: str) -> Callable[[Job], tuple[nn.Module, Step]]:
    """The factory of a preset, whose model is sharded; tensor-parallel, with divided experts and in stages, if the job is.

    Raises PlanError for an unknown name, and if transformers is missing or does not import. The factory raises PlanError for a
    sequence beyond the model's context, and for parallelism that the model has no plan for.
    """
    if name not in PRESETS:
        raise PlanError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    with importing_transformers(f"preset {name}"):
        import transformers

        config_class: Any = getattr(transformers, f"{preset.kind}Config")
        model_class: Any = getattr(transformers, f"{preset.kind}{preset.head}")

    def make(job: Job) -> tuple[nn.Module, Step]:
        if job.sequence is not None and job.sequence > preset.context:
            raise PlanError(f"preset {name} with sequence={job.sequence}: expected at most {preset.context} tokens")
        config = dict(preset.config)
        if job.pp > 1:
            _check_stages(name, preset, job.pp)
            config["num_hidden_layers"] = len(blocks_of_stage(config["num_hidden_layers"], job.stage, job.pp))
        model = model_class(config_class(**config, use_cache=False))
        fit_to_meta(model)
        if job.pp > 1:
            _keep_ends(model, job)
        if job.tp > 1:
            _check_tensor_parallel(name, preset, job.tp)
            parallelize_module(model, job.mesh()["tp"], _present(llama_plan(), job))
        if job.ep > 1:
            _check_experts(name, preset, job.ep)
            parallelize_module(model, job.expert_mesh()["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})
        shard_model(model, job, name)
        return model, _step

    return make


def _step(model: nn.Module, job: Job) -> torch.Tensor:
    """With its positions given, the model does not derive them from its part of the sequence."""
    length = job.local_sequence
    assert length is not None, "the preset's"
    tokens, positions = torch.zeros((job.batch, length), dtype=torch.int64), torch.arange(length)[None]
    if job.stage == 0:
        made = model(tokens, position_ids=positions).logits
    else:
        width: Any = model.config.hidden_size  # type: ignore[union-attr]
        received = job.receive(job.batch, math.ceil(length / job.tp), width)
        made = model(inputs_embeds=received, position_ids=positions).logits
    return token_loss(made, tokens) if job.stage == job.pp - 1 else made


# ---------------------------------------------------------------------- stages and experts


def _check_stages(name: str, preset: Preset, pp: int) -> None:
    layers = preset.config.get("num_hidden_layers")
    if layers is None:
        raise PlanError(f"preset {name} with pp={pp}: its first and last layers share a weight; expected pp=1")
    if pp > layers:
        raise PlanError(f"preset {name} with pp={pp}: expected at most its {layers} layers")


def _keep_ends(model: Any, job: Job) -> None:
    """Leave the ends of a job's stage: without an embedding it takes `inputs_embeds`, without a head `logits` are hidden."""
    if job.stage > 0:
        model.model.embed_tokens = None
    if job.stage < job.pp - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()


def _check_experts(name: str, preset: Preset, ep: int) -> None:
    experts = preset.config.get("num_local_experts", 0)
    if not experts or experts % ep:
        expected = f"a divisor of its {experts} experts" if experts else "ep=1: it has no experts"
        raise PlanError(f"preset {name} with ep={ep}: expected {expected}")


# ---------------------------------------------------------------------- tensor parallelism


def _check_tensor_parallel(name: str, preset: Preset, tp: int) -> None:
    if preset.kind != "Llama":
        raise PlanError(f"preset {name} with tp={tp}: there is no tensor-parallel plan for it; expected tp=1, or a Llama")
    heads = preset.config["num_key_value_heads"]
    if heads % tp:
        raise PlanError(f"preset {name} with tp={tp}: expected a divisor of its {heads} key and value heads")


def _present(plan: dict[str, ParallelStyle], job: Job) -> dict[str, ParallelStyle]:
    """The plan of the modules that the job's stage has."""
    first, last = {"model.embed_tokens"}, {"model.norm", "lm_head"}
    absent = (first if job.stage > 0 else set()) | (last if job.stage < job.pp - 1 else set())
    return {name: style for name, style in plan.items() if name not in absent}


def llama_plan() -> dict[str, ParallelStyle]:
    """Tensor and sequence parallelism of a Llama of transformers: between matrices, each rank has a part of the sequence."""
    whole, part = Replicate(), Shard(1)
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": part},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=True,
    )
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "model.layers.*.*layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": attention,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=part),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=True),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=part),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }
