"""Batch normalization over the rows of all ranks, beside torch's on the whole batch in one process."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import MismatchError, World
from toys import check_backward, mean_over_ranks, shard_blocks, step_all

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def rows_of(world: World, x: torch.Tensor, uneven: bool) -> torch.Tensor:
    """This rank's rows; uneven: 1, 2, 3, ... of them, the rest on the last rank, none on rank 1 of several."""
    if not uneven:
        return x.chunk(world.size)[world.rank]
    counts = [0 if rank == 1 else rank + 1 for rank in range(world.size)]
    counts[-1] = len(x) - sum(counts[:-1])
    return x.split(counts)[world.rank]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 3 + 1


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("ndim", KINDS)
@on_ranks(1, 2, 3, 4)
def test_a_rank_normalizes_with_the_statistics_of_all_rows(world: World, ndim: int, uneven: bool) -> None:
    """Forward, the input's gradient, the sum of the ranks' parameter gradients, and the running statistics."""
    whole = KINDS[ndim](3, momentum=None if ndim == 3 else 0.3, affine=ndim != 5).double()
    if whole.affine:
        nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(1))
    synced = shardrt.convert_sync_batchnorm(copy.deepcopy(whole))
    assert type(synced) is shardrt.SyncBatchNorm
    for step in range(3):
        x = draw(12, 3, *[2] * (ndim - 2), seed=step)
        mine = rows_of(world, x, uneven).clone().requires_grad_()
        x.requires_grad_()
        y, out = whole(x), synced(mine)
        torch.testing.assert_close(out, rows_of(world, y, uneven), rtol=1e-12, atol=1e-12)
        seen = draw(*x.shape, seed=step + 10)
        (y * seen).sum().backward()
        (out * rows_of(world, seen, uneven)).sum().backward()
        torch.testing.assert_close(mine.grad, rows_of(world, x.grad, uneven), rtol=1e-12, atol=1e-12)
        for expected, param in zip(whole.parameters(), synced.parameters(), strict=True):
            total = mean_over_ranks(world, param.grad) * world.size
            torch.testing.assert_close(total, expected.grad, rtol=1e-12, atol=1e-12)
            expected.grad = param.grad = None
        for expected, buffer in zip(whole.buffers(), synced.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)
        assert world.mesh.differing([buffer.tolist() for buffer in synced.buffers()]) is None, "the same bits everywhere"
    x = draw(2, 3, *[2] * (ndim - 2))
    assert torch.equal(synced.eval()(x), whole.load_state_dict(synced.state_dict()) and whole.eval()(x))


@on_ranks(2)
def test_without_running_statistics(world: World) -> None:
    """In training over all ranks; in eval mode, as with torch's, with those of the rank's own rows, without communication."""
    whole = nn.BatchNorm1d(3, track_running_stats=False).double()
    synced = shardrt.convert_sync_batchnorm(copy.deepcopy(whole))
    x = draw(8, 3)
    mine = x.chunk(2)[world.rank]
    torch.testing.assert_close(synced(mine), whole(x).chunk(2)[world.rank], rtol=1e-12, atol=1e-12)
    synced.eval()
    if world.rank == 0:
        assert torch.equal(synced(mine), whole(mine))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
@on_ranks(2)
def test_narrow_dtypes_are_summed_in_float32(world: World, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A mean far from zero; gradients have the dtypes of input and parameters, the buffers their own."""
    whole = nn.BatchNorm1d(3, dtype=dtypes[1])
    synced = shardrt.convert_sync_batchnorm(copy.deepcopy(whole))
    x = draw(16, 3, dtype=dtypes[0]) + 100
    mine = x.chunk(2)[world.rank].clone().requires_grad_()
    out = synced(mine)
    expected = whole.double()(x.double()).chunk(2)[world.rank]
    assert out.dtype is dtypes[0]
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-2, atol=2e-2 if dtypes[0] is torch.bfloat16 else 1e-5)
    out.float().square().sum().backward()
    assert (mine.grad.dtype, synced.weight.grad.dtype, synced.bias.grad.dtype) == (dtypes[0], dtypes[1], dtypes[1])
    assert synced.running_mean.dtype is dtypes[1]


@on_ranks(1, 2, 3)
def test_gradients_of_gradients(world: World) -> None:
    """A gradient penalty: the gradient of the input's gradient, to the input and the parameters."""
    whole = nn.BatchNorm1d(3).double()
    synced = shardrt.convert_sync_batchnorm(copy.deepcopy(whole))
    x, seen = draw(12, 3).requires_grad_(), draw(12, 3, seed=1)
    mine = x.detach().chunk(world.size)[world.rank].clone().requires_grad_()
    for module, rows, weights in ((whole, x, seen), (synced, mine, seen.chunk(world.size)[world.rank])):
        (grad,) = torch.autograd.grad((module(rows).sin() * weights).sum(), rows, create_graph=True)
        (grad.square() * weights).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad.chunk(world.size)[world.rank], rtol=1e-10, atol=1e-12)
    assert x.grad.abs().max() > 1e-3
    for expected, param in zip(whole.parameters(), synced.parameters(), strict=True):
        total = mean_over_ranks(world, param.grad) * world.size if param.grad is not None else None
        torch.testing.assert_close(total, expected.grad, rtol=1e-10, atol=1e-12)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("late", [False, True])
@on_ranks(1, 2, 4)
def test_a_sharded_model_trains_as_one_process_on_the_whole_batch(world: World, late: bool) -> None:
    """Converted before or after it is sharded. Hooks stay; a copy normalizes over the same ranks."""
    whole = Convolutions().double()
    model = copy.deepcopy(whole)
    called = []
    model.blocks[0][1].register_forward_hook(lambda *_: called.append(1))
    if late:
        shard_blocks(model)
    assert shardrt.convert_sync_batchnorm(model) is model
    if not late:
        shard_blocks(model)
    model = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, model)]
    for step in range(3):
        check_backward(world, whole, model, draw(8, 3, 4, 4, seed=step), loss=lambda each, x: each(x).square().mean())
        step_all(*optimizers)
        for (name, expected), buffer in zip(whole.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert len(called) == 3
    model.eval()
    if world.rank == 0:
        assert not model.blocks[0][1].training


@on_ranks(1, 2)
def test_torchs_own_is_refused(world: World) -> None:
    """In `fully_shard`, and at a forward if it came later: every time, and on every rank."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions().double())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^'1' is torch's SyncBatchNorm, .* call shardrt.convert_sync_batchnorm\(model\)"):
            shardrt.fully_shard(model.blocks[0])
    refused(r"^'SyncBatchNorm' is torch's", lambda: shardrt.fully_shard(nn.SyncBatchNorm(3)))
    x = draw(2, 3, 4, 4)
    for forwards in (0, 1):
        model = Convolutions().double()
        shard_blocks(model)
        for _ in range(forwards):
            model(x)
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'blocks.0.1' is torch's SyncBatchNorm"):
                model(x)
        shardrt.convert_sync_batchnorm(model)


class WithActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@on_ranks(1, 2)
def test_what_cannot_be_converted(world: World) -> None:
    """Named on every rank, and nothing is changed."""
    for other in (WithActivation(3), nn.LazyBatchNorm2d(), shardrt.fully_shard(nn.BatchNorm1d(3))):
        model = nn.Sequential(nn.BatchNorm1d(3), other)
        with pytest.raises(ValueError, match=rf"'1' is a {type(other).__name__}; expected one of Batch"):
            shardrt.convert_sync_batchnorm(model)
        assert type(model[0]) is nn.BatchNorm1d
    grouped = nn.SyncBatchNorm(3, process_group="a group")
    refused("'0' has a process_group", lambda: shardrt.convert_sync_batchnorm(nn.Sequential(grouped)))
    refused("expected a DeviceMesh", lambda: shardrt.convert_sync_batchnorm(nn.Sequential(), "dp"), TypeError)
    if world.size > 1:
        with pytest.raises(ValueError, match=r"different batch normalizations: rank 0: none; rank 1: '0': BatchNorm1d\(3"):
            shardrt.convert_sync_batchnorm(nn.Sequential(*[nn.BatchNorm1d(3)] * world.rank))
        with pytest.raises(ValueError, match=r"'0' is a WithActivation.* \(rank 1\)"):
            shardrt.convert_sync_batchnorm(nn.Sequential([nn.BatchNorm2d, WithActivation][world.rank](3)))
    for wrong in (draw(3), draw(2, 4)):
        with pytest.raises(ValueError, match=r"of 3 channels: expected an input of shape \(rows, 3, ...\), found \("):
            shardrt.SyncBatchNorm(3)(wrong)
    with pytest.raises(ValueError, match=r"xpected .*more than 1 value|at least 2 elements of a channel .* found 1"):
        shardrt.SyncBatchNorm(3).double()(draw(int(world.rank == 0), 3))


@on_ranks(4)
def test_the_ranks_of_a_part_of_the_mesh(world: World) -> None:
    """Tensor-parallel ranks have the same rows: the data-parallel ones alone make one batch."""
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = nn.BatchNorm1d(3).double()
    synced = shardrt.SyncBatchNorm(3, mesh=mesh["dp"], dtype=torch.float64)
    x = draw(4, 3)
    part = mesh["dp"].rank
    torch.testing.assert_close(synced(x.chunk(2)[part]), whole(x).chunk(2)[part], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(synced.running_var, whole.running_var, rtol=1e-12, atol=1e-12)
    assert type(shardrt.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), mesh["dp"])[0]) is type(synced)
    refused(r"DeviceMesh.* cannot be pickled", lambda: pickle.dumps(synced), TypeError)


@on_ranks(2, 3)
def test_statistics_of_other_modules(world: World) -> None:
    """Ranks that skip different ones of one size do not mix them up, whether the names are the conversion's or the root's."""
    x = torch.randn(5, 4)
    for late in (False, True):
        model = nn.Sequential(*(nn.BatchNorm1d(4) if not late else shardrt.SyncBatchNorm(4) for _ in range(3)))
        model.append(nn.Linear(4, 4))
        model = shardrt.fully_shard(model) if late else shardrt.convert_sync_batchnorm(model)
        model(x)
        del model[world.rank % 2]
        with pytest.raises(MismatchError, match=r"of '0'.*of '1'|of '1'.*of '0'"):
            model(x)
