"""`zeros`, `ones`, `empty`, `full`, `rand` and `randn` as `DTensor`s: each rank makes its shard, never the full tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

import torch

from ...comm import DeviceMesh, current_mesh
from ..dtensor.dtensor import DTensor
from ..dtensor.inference_mode import outside_inference_mode
from ..placement.placement import Placement, Replicate, Spec, local_shape


class Options(TypedDict, total=False):
    """What all factories take.

    dtype: None: torch's default.   layout: `torch.strided` only.   requires_grad: of the new leaf; default: False.
    device_mesh: None: that of the `with mesh:` around the call.
    placements: one for each mesh axis; None: `Replicate` on each. No `Partial`, of which there is no one way to make terms.
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: DeviceMesh | None
    placements: Sequence[Placement] | None


def zeros(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """A `DTensor` of zeros on the mesh's device. No communication. Cost, of all factories: this rank's shard.

    size: the global shape: integers, or one sequence of them.   options: `dtype`, `layout`, `requires_grad`, `device_mesh` and
        `placements`, as in `torch.distributed.tensor`; see `Options`.
    Raises, as all factories do, ValueError for placements that do not fit the mesh or the shape, a `Partial`, and another
    layout; TypeError for what is not a `Placement`; RuntimeError without a mesh.
    """
    return _made("zeros", _shape(size), options, torch.zeros)


def ones(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """A `DTensor` of ones. See `zeros`."""
    return _made("ones", _shape(size), options, torch.ones)


def empty(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """A `DTensor` of memory as it is. See `zeros`. Replicas need not be alike until they are written to."""
    return _made("empty", _shape(size), options, torch.empty)


def full(size: int | Sequence[int], fill_value: bool | float | complex, **options: Unpack[Options]) -> DTensor:
    """A `DTensor` of this value. See `zeros`. dtype: None: that of `torch.full` for the value."""

    def filled(shape: torch.Size, *, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
        return torch.full(shape, fill_value, dtype=dtype, device=device)

    return _made("full", _shape((size,)), options, filled)


def rand(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """Uniform random numbers in [0, 1): the same on any number of ranks, by any placements. See `zeros`.

    Collective: rank 0's default generator gives the seed. Cost: a broadcast of 8 bytes, and see `tensor/placement/random.py`.
    """
    return _drawn("rand", _shape(size), options, torch.Tensor.uniform_)


def randn(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """Normal random numbers of mean 0 and variance 1. See `rand`."""
    return _drawn("randn", _shape(size), options, torch.Tensor.normal_)


def _shape(size: Sequence[int | Sequence[int]]) -> torch.Size:
    only = size[0] if len(size) == 1 else size
    return torch.Size((only,) if isinstance(only, int) else only)  # type: ignore[arg-type]


@outside_inference_mode()
def _made(name: str, shape: torch.Size, options: Options, make: Callable[..., torch.Tensor]) -> DTensor:
    mesh = options.get("device_mesh") or current_mesh()
    placements = options.get("placements")
    spec = Spec.of(mesh, (Replicate(),) * mesh.ndim if placements is None else placements, shape)
    if spec.partial or (layout := options.get("layout", torch.strided)) is not torch.strided:
        found = spec.placements if spec.partial else layout
        raise ValueError(f"{name} of shape {tuple(shape)} on {mesh}: expected shards or replicas, strided; found {found}")
    local = make(local_shape(mesh, spec.placements, shape), dtype=options.get("dtype"), device=mesh.device)
    tensor = DTensor(local, spec)
    tensor.requires_grad = options.get("requires_grad", False)
    return tensor


def _drawn(name: str, shape: torch.Size, options: Options, draw: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
    tensor = _made(name, shape, options, torch.empty)
    with torch.no_grad():
        draw(tensor)
    return tensor
