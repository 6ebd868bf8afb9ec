"""Gathers of 8-bit codes: shards stay in full precision, and every rank decodes the same values.

| step (gather stream) | before -> after                                                   | cost                            |
|----------------------|--------------------------------------------------------------------|---------------------------------|
| encode               | this rank's shards (s,) -> codes (s,), scales (s / 256,)           | shards read, codes written      |
| gather               | codes (N * s,), scales (N * s / 256,) of all ranks                 | 2 all-gathers in one go         |
| decode               | codes times scales -> full (N * s,), this rank's part included     | codes read, full written        |

Legend: N ranks; s elements in a segment of the layout, a multiple of 256. The codes are freed after the last step.
Blocks of 256 elements share a scale. They are counted from the start of each parameter, so what is decoded does not depend on
the number of ranks. Shards are encoded from their own dtype and decoded to that of compute, without a cast between. Gathers of
blockwise codes are an idea of ZeRO++ (arXiv:2306.10209).
"""

from __future__ import annotations

import torch

from ...comm import Stream, Work
from ...kernels import decode_sum, encode, pack_into
from ...kernels.reference import BLOCK
from ..base.events import BufferKind
from ..memory.buffers import FlatBuffer
from ..params.layout import ALIGNMENT, round_up
from .gather import FlatGather

_SCALE = torch.float32


class QuantizedGather(FlatGather):
    """Gathers a group of parameters as codes and scales. All have the same dtype, and the same compute dtype."""

    windowed = False
    # Written when the buffers are made.
    _coded: FlatBuffer  # codes and scales of all ranks; with offloading this rank's shards as well
    _codes: torch.Tensor  # (N * s,)
    _scales: torch.Tensor  # (N * s / 256,)
    _own_codes: torch.Tensor  # (s,) of the codes
    _own_scales: torch.Tensor  # (s / 256,) of the scales
    _own: torch.Tensor  # (s,) this rank's shards, in their own dtype, on the mesh's device
    _decoded: torch.Tensor  # (N * s,) all of `full`

    @property
    def joint(self) -> bool:
        """False: it decodes what it gathers right after the gather."""
        return False

    @property
    def is_local(self) -> bool:
        """False: the codes of a single rank are gathered as well."""
        return False

    @property
    def _numel(self) -> int:
        """Elements of a segment."""
        return self.layout.segment_nbytes // self._dtypes[0].itemsize

    def _place_own(self) -> tuple[list[int], int]:
        """The parts lie as in the segment, but in the parameters' own dtype. Invariant: the padding of blocks is zero."""
        itemsize, gathered = self.params[0].dtype.itemsize, self._dtypes[0].itemsize
        ranges = [self.layout.owned(index, self.mesh.rank) for index in range(len(self.params))]
        return [owned.offset // gathered * itemsize for owned in ranges], self._numel * itemsize

    def _make_own_views(self) -> None:
        codes, ranks, rank, numel = self._policies.quantization.gather, self.mesh.size, self.mesh.rank, self._numel
        assert codes is not None, "it is quantised"
        blocks, dtype = numel // BLOCK, self.params[0].dtype
        scales_at = ranks * numel
        end = scales_at + ranks * blocks * _SCALE.itemsize
        own_at = round_up(end, ALIGNMENT)
        nbytes = own_at + numel * dtype.itemsize if self.offloads else end
        self._coded = self._buffers.make(BufferKind.CODES, nbytes, pool=self._pool)
        self._codes = self._coded.view(codes, 0, (ranks * numel,))
        self._scales = self._coded.view(_SCALE, scales_at, (ranks * blocks,))
        self._own_codes = self._codes[rank * numel :][:numel]
        self._own_scales = self._scales[rank * blocks :][:blocks]
        self._own = self._coded.view(dtype, own_at, (numel,)) if self.offloads else self._flat_shard.view(dtype)
        self._decoded = self.full.view(self._dtypes[0], 0, (ranks * numel,))
        self._coded.seal()
        for param in self.params:
            param.codes = codes

    def _gather_shards(self, stream: Stream) -> Work:
        stream.submit(self._encode)
        with self.comm.group():
            self.comm.all_gather(self._codes, self._own_codes, stream=stream)
            self.comm.all_gather(self._scales, self._own_scales, stream=stream)
        stream.submit(self._decode)
        return Work(stream.record())

    def _encode(self) -> None:
        self._coded.allocate()
        if self.offloads:
            pack_into([self._own.view(torch.uint8)], [self._flat_shard])
        encode(self._own_codes, self._own_scales, self._own)

    def _decode(self) -> None:
        decode_sum(self._decoded, self._codes[None], self._scales[None])
        self._coded.release()
