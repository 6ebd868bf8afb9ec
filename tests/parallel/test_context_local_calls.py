"""What a model computes of this rank's tokens alone, in a context of context parallelism: told at its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import on_ranks
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import context_parallel

TOKENS, ROWS, WIDTH = 22, 2, 4


def told(world: World, run: Callable[[torch.Tensor], object]) -> str:
    """The one warning of a context in which this runs with (B, T, C), or nothing."""
    mesh, x = DeviceMesh(world.comm, (world.size,), ("cp",)), torch.randn(ROWS, TOKENS, WIDTH, device=world.device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            run(x)
    assert len(seen) <= 1
    assert all(Path(one.filename).name == Path(__file__).name for one in seen)
    return str(seen[0].message) if seen else ""


def attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def padded(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x.transpose(1, 2), (4, 0)), torch.ones(WIDTH, WIDTH, 3), dilation=2)


def by_products(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1) @ x


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


MIXING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "products": (by_products, "no attention that reaches other ranks' tokens: expected F.scaled_dot"),
    "module": (Causal(), "conv1d in Causal.forward (test_context_local_calls.py:"),
    "function": (padded, "conv1d in padded"),
    "lstm": (nn.LSTM(WIDTH, 3, batch_first=True), "lstm in "),
    "gru": (lambda x: nn.GRU(WIDTH, 3)(x.transpose(0, 1)), "gru in "),
    "rnn": (nn.RNN(WIDTH, 3, batch_first=True), "rnn_tanh in "),
    "cumsum": (lambda x: x.cumsum(-2), "cumsum in "),
    "cumprod": (lambda x: torch.cumprod(x, dim=1), "cumprod in "),
    "arange": (lambda x: torch.arange(x.shape[1]), "arange in "),
    "later": (lambda x: torch.arange(2, 2 + x.shape[1]), "arange in "),
    "table": (lambda x: x + nn.Embedding(TOKENS, WIDTH).weight[: x.shape[1]], "__getitem__ in "),
    "row": (lambda x: torch.arange(50).view(1, -1)[:, : x.shape[1]], "__getitem__ in "),
}


@pytest.mark.parametrize("kind", MIXING)
@on_ranks(1, 2, 3)
def test_what_mixes_tokens(world: World, kind: str) -> None:
    """Where there are several ranks, by name, with the line of the caller."""
    run, expected = MIXING[kind]
    for attends in (False, True):
        text = told(world, lambda x, attends=attends: (run(x), attends and attended(x)))
        assert (expected in text) == (world.size > 1 and not (attends and kind == "products"))


def other_dims(x: torch.Tensor) -> torch.Tensor:
    """What is like the calls that are told, and treats tokens alone."""
    tokens = x.shape[1]
    wide = F.linear(x, torch.ones(3 * tokens, WIDTH, requires_grad=True))
    both = wide[..., :tokens] * wide[..., tokens : 2 * tokens]
    torch.arange(0, 2 * tokens, 2)
    torch.arange(tokens + 1)
    F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, WIDTH, 1))
    x.cumsum(-1)
    (x > 0).cumsum(1)
    nn.GRU(WIDTH, 3, batch_first=True)(x[:, :1])
    x[:, :tokens]
    with torch.no_grad():
        wide.detach()[:1, ..., :tokens]
        wide.detach()[:, :2]
    return both


@on_ranks(2, 3)
def test_what_does_not(world: World) -> None:
    assert told(world, lambda x: (other_dims(x), attended(x))) == ""
    assert told(world, lambda x: x + 1) == ""


@on_ranks(2)
def test_an_error_in_the_block(world: World) -> None:
    """It comes alone."""
    with pytest.raises(KeyError):
        told(world, lambda x: (by_products(x), {}[0]))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@on_ranks(2)
def test_models_of_transformers(world: World, kind: str) -> None:
    """Not with position ids and sdpa; without position ids, or with attention of its own, they are told."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    config = getattr(transformers, f"{kind}Config")(vocab_size=13, pad_token_id=0, **sizes, attn_implementation="sdpa")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(world.device)
    mesh = DeviceMesh(world.comm, (2,), ("cp",))

    def run(**inputs: Any) -> str:
        tokens, ones = torch.ones(ROWS, TOKENS, dtype=torch.int64), torch.ones(ROWS, TOKENS, dtype=torch.int64)
        positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with context_parallel(mesh, buffers=[tokens, positions, ones], buffer_seq_dims=[1] * 3):
                model(input_ids=tokens, attention_mask=ones, use_cache=False, **{"position_ids": positions, **inputs})
        return " ".join(str(one.message) for one in seen)

    assert run() == ""
    assert "arange in " in (text := run(position_ids=None))
    assert f"{kind}Model.forward (modeling_{kind.lower()}.py:" in text
    assert "position_ids=" in text
    model.set_attn_implementation("eager")
    assert "attn_implementation='sdpa'" in run()
