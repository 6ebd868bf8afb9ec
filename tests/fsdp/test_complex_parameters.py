"""Models with trainable complex parameters, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, refused, with_copies
from shardrt import checkpoint
from shardrt.comm import DeviceMesh, ReduceOp, World
from toys import batch, check_backward, compare, loss_of, paired, shard_blocks, train_side_by_side


class FourierBlock(nn.Module):
    """Complex parameters of one, two and no dims, beside real ones, with uneven rows."""

    conjugates = False  # gives a gradient that is conjugated lazily, on which torch's Adam fails

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(7, dtype=dtype))
        self.mix = nn.Parameter(torch.randn(7, 7, dtype=dtype) / 4)
        self.phase = nn.Parameter(torch.tensor(0.6 + 0.8j, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(13, dtype=dtype.to_real()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(x).to(self.mix.dtype)
        mixed = nn.functional.linear(found * (self.spectrum.conj() if self.conjugates else self.spectrum), self.mix)
        mixed = (mixed * self.phase).to(torch.complex128)
        return x + torch.tanh(torch.fft.irfft(mixed, n=13) + self.bias)


class Fourier(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        real = dtype.to_real()
        self.inp = nn.Linear(5, 13, dtype=real)
        self.blocks = nn.ModuleList(FourierBlock(dtype) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(13, dtype=dtype))
        self.out = nn.Linear(13, 3, dtype=real)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out((x * self.gain).real.to(self.out.weight.dtype))


@pytest.mark.parametrize("microbatches", [1, 2])
@on_ranks(1, 2, 3)
def test_training(world: World, microbatches: int) -> None:
    train_side_by_side(world, Fourier(), map(batch, range(3)), microbatches=microbatches)


@on_ranks(2)
@with_copies
def test_training_with_copies(world: World) -> None:
    train_side_by_side(world, Fourier(), map(batch, range(2)))


@on_ranks(4)
def test_hybrid_sharding(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    train_side_by_side(world, Fourier(), map(batch, range(2)), shard=lambda model: shard_blocks(model, mesh=mesh))


@on_ranks(1, 2)
def test_gradients_that_are_conjugated_lazily(world: World) -> None:
    whole = Fourier()
    for block in whole.blocks:
        block.conjugates = True
    sharded = shard_blocks(copy.deepcopy(whole))
    for _ in range(2):  # accumulated
        check_backward(world, whole, sharded, batch(0))


@on_ranks(2)
def test_policies_leave_them_as_they_are(world: World) -> None:
    """Real parameters are cast and reduced in other dtypes; complex ones are not."""
    model = shard_blocks(
        Fourier(torch.complex64),
        mp_policy=shardrt.MixedPrecisionPolicy(
            param_dtype=torch.float64, reduce_dtype=torch.float64, output_dtype=torch.float64
        ),
        quantization_policy=shardrt.QuantizationPolicy(torch.int8, min_numel=1),
    )
    whole = Fourier(torch.complex64)
    whole.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    for param in whole.parameters():
        if not param.is_complex():
            param.data = param.data.double()
    loss_of(whole, batch(0)).backward()
    loss_of(model, batch(0).chunk(world.size)[world.rank]).backward()
    for (name, expected), param in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert param.grad.dtype == param.dtype
        tolerance = 1e-5 if param.dim() < 2 or param.is_complex() else 0.05  # codes
        torch.testing.assert_close(
            param.grad.full_tensor(), expected.grad, rtol=tolerance, atol=tolerance, check_dtype=False, msg=name
        )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(1, 2)
def test_clipping(world: World, norm_type: float) -> None:
    whole, sharded = paired(Fourier())
    for clip in (shardrt.clip_grad_norm_, nn.utils.clip_grad_norm_):
        for model, rows in ((whole, batch(0)), (sharded, batch(0).chunk(world.size)[world.rank])):
            model.zero_grad()
            loss_of(model, rows).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
        found = clip(sharded.parameters(), 0.01, norm_type)
        found = found.full_tensor() if isinstance(found, shardrt.DTensor) else found
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        compare(whole, sharded, 1e-12, "clipped")


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.AdamW, {"foreach": True, "eps": 1e-3}),
    (torch.optim.Adam, {"foreach": False, "amsgrad": True, "eps": 1e-3}),
    (torch.optim.RMSprop, {"foreach": False, "eps": 1e-3}),
]


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)))
@on_ranks(2)
def test_optimizers_and_checkpoints(world: World, index: int) -> None:
    """Steps are those of one process; state dicts, checkpoints and safetensors have the values."""
    kind, options = OPTIMIZERS[index]
    models = [Fourier(), Fourier(), Fourier()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models[1:]:
        shard_blocks(model)
    optimizers = [kind(model.parameters(), lr=1e-2, **options) for model in models]

    def step(which: int, number: int) -> None:
        rows = batch(number) if which == 0 else batch(number).chunk(world.size)[world.rank]
        optimizers[which].zero_grad()
        loss_of(models[which], rows).backward()
        optimizers[which].step()

    for number in range(2):
        step(0, number)
        step(1, number)
    compare(models[0], models[1], 1e-10, "stepped")
    with shared_folder(world) as folder:
        checkpoint.save(folder / "saved", {"model": models[1], "optimizer": optimizers[1]})
        checkpoint.load(folder / "saved", {"model": models[2], "optimizer": optimizers[2]})
        step(0, 2)
        step(2, 2)
        compare(models[0], models[2], 1e-10, "loaded")
        narrow, loaded = (shard_blocks(Fourier(torch.complex64)) for _ in range(2))
        checkpoint.save_safetensors(narrow, folder / "exported")
        checkpoint.load_safetensors(loaded, folder / "exported")
        for mine, theirs in zip(loaded.parameters(), narrow.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    full = checkpoint.get_model_state_dict(models[2], options=checkpoint.StateDictOptions(full_state_dict=True))
    for name, param in models[0].state_dict().items():
        torch.testing.assert_close(full[name], param, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@on_ranks(1, 3)
def test_reductions_of_complex_numbers(world: World, dtype: torch.dtype) -> None:
    """As pairs of real numbers, also of what is conjugated lazily; a maximum is refused."""
    every = [torch.arange(6.0 * world.size).to(dtype) * (1 + 1j) ** rank for rank in range(world.size)]
    mine = every[world.rank]
    out = torch.empty_like(mine)
    world.comm.all_reduce(out, mine.conj(), ReduceOp.SUM, stream=world.stream).synchronize()
    torch.testing.assert_close(out, torch.stack(every).sum(0).conj().resolve_conj())
    block = torch.empty(6, dtype=dtype)
    world.comm.reduce_scatter(block, mine, ReduceOp.AVG, stream=world.stream).synchronize()
    torch.testing.assert_close(block, torch.stack(every).mean(0)[6 * world.rank :][:6])
    on_first = out if world.rank == 0 else None
    world.comm.reduce(on_first, mine, ReduceOp.SUM, 0, stream=world.stream).synchronize()
    if on_first is not None:
        torch.testing.assert_close(on_first, torch.stack(every).sum(0))
    refused(
        f"MAX of {dtype} is not defined; use SUM or AVG",
        lambda: world.comm.all_reduce(out, mine, ReduceOp.MAX, stream=world.stream),
    )


@on_ranks(2)
def test_tensors(world: World) -> None:
    plain = torch.randn(7, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    tensor = shardrt.distribute_tensor(plain, world.mesh, [shardrt.Shard(0)])
    for found, expected in (
        (tensor.sum(), plain.sum()),
        (tensor.mean(), plain.mean()),
        (tensor.norm(), plain.norm()),
        (tensor.abs().max(), plain.abs().max()),
        ((tensor * 2j).full_tensor(), plain * 2j),
        (tensor.redistribute([shardrt.Shard(1)]).full_tensor(), plain),
        (torch.view_as_real(tensor)[:, :, 0], plain.real),
    ):
        torch.testing.assert_close(torch.as_tensor(found), expected)
    summed = shardrt.DTensor.from_local(plain, world.mesh, [shardrt.Partial()]).full_tensor()
    torch.testing.assert_close(summed, plain * world.size)


CONJUGATES: dict[str, Callable[[Any], Any]] = {
    "conj": lambda p: p.conj(),
    "conj + p": lambda p: p.conj() + p,
    "p * conj": lambda p: p * p.conj(),
    "mH": lambda p: p.mH,
    "detached": lambda p: p.detach().conj().resolve_conj(),
    "imag": lambda p: p.conj().imag,
    "exp": lambda p: p.exp().real.sum(),
    "square": lambda p: (p * p).abs().square().sum(),
    "reciprocal": lambda p: (1 / p).abs().sum(),
}


@pytest.mark.parametrize("name", CONJUGATES)
@on_ranks(1, 2, 3)
def test_conjugates_of_shards(world: World, name: str) -> None:
    """Their values, and the gradients whose formulas have them."""
    whole = nn.Parameter(torch.randn(7, 5, dtype=torch.complex128))
    sharded: Any = nn.Parameter(shardrt.distribute_tensor(whole.detach().clone(), world.mesh, [shardrt.Shard(0)]))
    expected, found = CONJUGATES[name](whole), CONJUGATES[name](sharded)
    values = found.full_tensor() if isinstance(found, shardrt.DTensor) else found + 0
    torch.testing.assert_close(values.detach(), expected.detach().resolve_conj().resolve_neg())
    if expected.dim() == 0:
        expected.backward()
        found.backward()
        torch.testing.assert_close(sharded.grad.full_tensor().resolve_conj(), whole.grad.resolve_conj())
