"""Parameters that are tensor-parallel before `fully_shard` takes them: the rest of the runtime asks this file about them.

| method                          | called by                       | from -> to                                          |
|---------------------------------|---------------------------------|-----------------------------------------------------|
| `pre_flatten_transform`         | `fully_shard`                   | a parameter -> what is planned, and its outer spec  |
| `chunk_dtensor`                 | sharding, loading               | a DTensor on the outer mesh -> one on both meshes   |
| `chunk_tensor`                  | loading of a whole tensor       | the tensor -> this rank's part                      |
| `post_unflatten_transform`      | the first forward               | a view of what is gathered -> what the module sees  |
| `pre_load_state_dict_transform` | loading of a DTensor            | the tensor -> what is loaded, where its shard lies  |
| `all_gather_dtensor`            | loading from another mesh       | a DTensor there -> the whole tensor                 |

The names are those of torch's `FSDPExtensions` (torch/distributed/fsdp/_fsdp_extensions.py), with a mesh in the place of a
process group; where torch nests sharded tensors, there is a `DTensor` on both meshes. The outer mesh (the tensor-parallel one)
cuts first: of 5 rows on (tp 2, dp 2), the first tp rank has rows 0 1 | 2 and the second 3 | 4, where | separates the dp ranks.
Each column (the ranks with the same coordinates on the outer mesh) plans its own layout, so the counts of the inner placement
are those of this rank's column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...comm import DeviceMesh
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.replicated import grad_placements_of, replicas_mesh
from ...tensor.placement.placement import Box, FlatShard, Partial, Placement, Replicate, Shard, Sharded, Spec, local_shape

TERMS = "terms"  # the role of the communicators that add up terms of gradients


class FSDPExtensions(ABC):
    """What `fully_shard(extensions=...)` takes: how parameters that are distributed already are sharded again, and loaded."""

    @abstractmethod
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Spec | None]:
        """The plain tensor that is sharded for a parameter, and the spec of the parameter on the outer mesh.

        The spec may shard or replicate along each axis. None in its place: the parameter is sharded over the data parallel mesh
        only. This must not communicate, and must decide alike on every rank.
        """

    @abstractmethod
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Spec) -> torch.Tensor:
        """What the module sees of a gathered parameter: `tensor`, or another that shares its memory.

        tensor: of the shape that `pre_flatten_transform` gave; its memory comes and goes.   param_extension: the outer spec.
        """

    @abstractmethod
    def chunk_tensor(self, tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
        """This rank's part of a whole tensor. device_mesh: both meshes. placements: one for each of its axes."""

    @abstractmethod
    def chunk_dtensor(
        self, tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """A tensor on the outer mesh (a plain one is on none) as a `DTensor` on both meshes.

        device_mesh: the data parallel mesh. placements: one for each of its axes; None: `Shard(0)` on the last one, replicated
        on others. Collective only for a tensor that is on both meshes already.
        """

    @abstractmethod
    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Box, ...]]:
        """The tensor from which to load, and where this rank's shard of it lies in the whole one."""

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Gather over all axes but those of `parent_mesh`, the outer mesh; return the local part. Collective.

        parent_mesh: None: gather over all axes.
        """


class DTensorExtensions(FSDPExtensions):
    """Parameters that are `DTensor`s on another mesh, and plain ones that are marked as replicated over one."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Spec | None]:
        if isinstance(tensor, DTensor):
            return tensor._local_tensor, tensor.spec
        mesh = replicas_mesh(tensor)
        return tensor, None if mesh is None else Spec(mesh, (Replicate(),) * mesh.ndim, tensor.shape)

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Spec) -> torch.Tensor:
        return tensor

    def chunk_tensor(self, tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
        return Spec.of(device_mesh, placements, tensor.shape).local_shard(tensor)

    def chunk_dtensor(
        self, tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        inner = (*[Replicate()] * (device_mesh.ndim - 1), Shard(0)) if placements is None else tuple(placements)
        if not isinstance(tensor, DTensor):
            spec = Spec.of(device_mesh, inner, tensor.shape)
            return DTensor(spec.local_shard(tensor), spec)
        outer = tensor.spec
        if set(device_mesh.axis_names) < set(outer.mesh.axis_names) and outer.mesh[device_mesh.axis_names] is device_mesh:
            cut = outer.placements[: -device_mesh.ndim]
            return tensor.redistribute((*cut, *inner))
        spec = Spec.of(outer.mesh.product(device_mesh), (*outer.placements, *inner), outer.shape)
        return DTensor(spec.local_shard(tensor._local_tensor, axis=outer.mesh.ndim), spec)

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Box, ...]]:
        if isinstance(tensor, DTensor):
            return tensor, tensor.spec.boxes()
        return tensor, (Box((0,) * tensor.dim(), tuple(tensor.shape)),)

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        kept = () if parent_mesh is None else parent_mesh.axis_names
        named = zip(tensor.device_mesh.axis_names, tensor.placements, strict=True)
        return tensor.redistribute([placement if name in kept else Replicate() for name, placement in named]).to_local()


@dataclass(frozen=True, slots=True)
class OuterSharding:
    """How one parameter lies on the outer mesh, for the runtime.

    spec: on the outer mesh; its shape is the global one.
    grad_placements: one for each axis of that mesh; `Partial` where each rank has only a term of the gradient. None: nowhere.
    """

    spec: Spec
    extensions: FSDPExtensions
    grad_placements: tuple[Placement, ...] | None = None

    @classmethod
    def of(cls, param: torch.Tensor, extensions: FSDPExtensions) -> tuple[torch.Tensor, OuterSharding | None]:
        """What is sharded of a parameter, and how it lies on the outer mesh; None if it is on none."""
        local, spec = extensions.pre_flatten_transform(param)
        if spec is None:
            return local, None
        return local, cls(spec, extensions, grad_placements_of(param))

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's part, which the module sees."""
        return local_shape(self.spec.mesh, self.spec.placements, self.spec.shape)

    @property
    def most_numel(self) -> int:
        """The elements of the largest part: the same on all ranks."""
        shape = self.spec.shape
        for placement, size in zip(self.spec.placements, self.spec.mesh.shape, strict=True):
            resolved = placement.resolve(shape, size)
            shape = max((resolved.shard_shape(shape, rank) for rank in range(size)), key=torch.Size.numel)
        return shape.numel()

    @property
    def partial_mesh(self) -> DeviceMesh | None:
        """The ranks over which terms of the gradient are added up; None if every rank has all of it."""
        mesh = self.spec.mesh
        named = zip(mesh.axis_names, self.grad_placements or (), strict=False)
        names = tuple(name for name, placement in named if isinstance(placement, Partial))
        return mesh[names] if names else None

    @property
    def replicas(self) -> DeviceMesh | None:
        """The outer mesh, if the parameter is replicated over all of it: a forward may find that its gradients are terms."""
        return self.spec.mesh if all(isinstance(p, Replicate) for p in self.spec.placements) else None

    def mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Both meshes as one, its axes in the order of the cuts. Collective the first time. Raises ValueError if none fits."""
        return self.spec.mesh.product(device_mesh)

    def inside(self, device_mesh: DeviceMesh, inner: Sequence[Placement]) -> Spec:
        """The spec on both meshes, with these placements on the axes of the data parallel mesh."""
        return Spec(self.mesh(device_mesh), (*self.spec.placements, *inner), self.spec.shape)

    def open_communicators(self, device_mesh: DeviceMesh) -> None:
        """Make the communicators of both meshes that ranks of one column alone may need later. Collective the first time."""
        mesh = self.mesh(device_mesh)
        for name in mesh.axis_names:
            mesh[name].communicator("tensor")
        if (terms := self.partial_mesh or self.replicas) is not None:
            terms.communicator(TERMS)

    def gathered(self, spec: Spec) -> Spec:
        """The spec on both meshes of what the module sees."""
        inner = spec.mesh.ndim - self.spec.mesh.ndim
        return Spec(spec.mesh, (*self.spec.placements, *[Replicate()] * inner), spec.shape)

    def check(self, name: str, local: torch.Tensor) -> None:
        """Raise ValueError, which names the parameter, for an outer spec that a module cannot compute with."""
        ranks = self.spec.mesh
        if not all(isinstance(p, (Replicate, Sharded)) and not isinstance(p, FlatShard) for p in self.spec.placements):
            raise ValueError(
                f"parameter '{name}' is a DTensor of {self.spec}: expected it sharded between rows, or replicated, on each axis"
            )
        if local.shape != self.shape:
            raise ValueError(
                f"parameter '{name}' of {self.spec}: expected a part of shape {tuple(self.shape)} on rank {ranks.rank}, found "
                f"{tuple(local.shape)}"
            )
        wanted = zip(self.grad_placements or (), self.spec.placements, strict=False)
        fits = self.grad_placements is None or len(self.grad_placements) == ranks.ndim
        if not fits or any(isinstance(p, Partial) and (p != Partial() or own != Replicate()) for p, own in wanted):
            raise ValueError(
                f"parameter '{name}' of {self.spec}, grad_placements {self.grad_placements}: expected one for each "
                "axis, and Partial() only where the parameter is replicated"
            )

    def part(self, value: torch.Tensor, spec: Spec) -> torch.Tensor:
        """This rank's part, by `spec` on both meshes, of a value to shard or load. Collective except for plain tensors.

        value: a whole plain tensor, or a `DTensor` on any mesh of this rank.
        """
        outer, extensions = self.spec, self.extensions
        if not isinstance(value, DTensor):
            return extensions.chunk_tensor(value, spec.mesh, spec.placements)
        inner_mesh = spec.mesh[spec.mesh.axis_names[outer.mesh.ndim :]]
        inner = spec.placements[outer.mesh.ndim :]
        if value.spec.mesh is spec.mesh:
            return value.redistribute(spec.placements).to_local()
        if value.spec.mesh is outer.mesh:
            whole_inside = value.redistribute(outer.placements)
            return extensions.chunk_dtensor(whole_inside, inner_mesh, inner).to_local()
        return extensions.chunk_tensor(extensions.all_gather_dtensor(value, None), spec.mesh, spec.placements)
