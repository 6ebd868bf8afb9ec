"""torch's process group over shardrt's communicators."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from ... import comm as runtime
from ...comm import Communicator, Stream
from .arguments import counts, dense, equal_sizes, one, options, reduce_op, row, some
from .contiguous import Staging
from .dispatch import dispatched
from .lane import DeviceLane, HostLane
from .named import NamedGroup
from .reductions import all_reduced, reduce_scattered, reduced
from .work import ProcessGroupWork

Tensors = list[torch.Tensor]


class ProcessGroupShardrt(NamedGroup):
    """A group whose calls run on communicators of shardrt: one for CPU tensors and, in a world of GPUs, one for CUDA tensors.

    store, rank, size: as torch's.   ranks: the members' in the world, this one among them. Creating is collective over them.
    Calls with `async_op` run on a thread of the group's (on GPUs: a stream), others on the caller's stream. What a call is
    given is checked before anything is sent; where calls are compared, ranks that make different ones raise `MismatchError`.
    A call with `async_op` that has failed ends the group: later ones raise what it raised.
    """

    def __init__(self, store: Store, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(store, rank, size, name)
        world = runtime.world()
        self._ranks = tuple(ranks)
        self._splits = 0  # how often it was split, on every rank alike
        self._lanes: dict[str, HostLane | DeviceLane] = {}
        self._lanes["cpu"] = HostLane(world.comm.subset(ranks, f"{name}.cpu", on_host=True), f"{name}.cpu")
        if world.device.type == "cuda":
            self._lanes["cuda"] = DeviceLane(world.comm.subset(ranks, f"{name}.cuda"), f"{name}.cuda")
        self._together: list[ProcessGroupWork] | None = None  # the works of an open `_start_coalescing`

    # ------------------------------------------------------------------ groups

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._lanes]

    def _get_backend(self, device: torch.device) -> Any:
        if (kind := torch.device(device).type) not in self._lanes:
            raise RuntimeError(
                f"process group '{self._name}' is for {' and '.join(self._lanes) or 'nothing any more'}, not {kind}"
            )
        return self

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroupShardrt | None:
        """A group of these of its ranks, by their numbers in it; None on a rank that is not among them."""
        self._splits += 1
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}"
        ranks = [self._ranks[rank] for rank in new_ranks]
        made = ProcessGroupShardrt(PrefixStore(f"{name}/", self._store), new_ranks.index(self.rank()), len(ranks), ranks, name)
        made._desc = group_desc or self._desc
        return made

    splitGroup = split_group

    def shutdown(self) -> None:
        """Close the communicators, after the calls that were made. Collective, as `destroy_process_group`; idempotent."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    def _get_sequence_number_for_group(self) -> int:
        """How many calls the group's communicators have made: the same on every rank."""
        return sum(lane.comm.number for lane in self._lanes.values())

    # ------------------------------------------------------------------ one tensor for all

    @dispatched("broadcast", 1)
    def broadcast(self, tensors: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Rank `root`'s tensor, on every rank."""
        opts = options(BroadcastOptions, ("root", "timeout"), args, given)
        tensor, root = one("broadcast", tensors), self._checked_root("broadcast", opts.rootRank)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            buffer = staging.inp(tensor)
            comm.broadcast(buffer, buffer, root, stream=stream)
            staging.copy_out(tensor, buffer)

        return self._launch(tensor, call, [tensor], opts)

    @dispatched("all_reduce", 1)
    def allreduce(self, tensors: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """The tensor reduced over the ranks, on every rank, in place."""
        opts = options(AllreduceOptions, ("op", "timeout"), args, given)
        tensor = one("all_reduce", tensors)
        return self._launch(tensor, _reduce_in_place([tensor], opts.reduceOp), [tensor], opts)

    @dispatched("all_reduce", 1)
    def allreduce_coalesced(self, tensors: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Each tensor reduced over the ranks, on every rank, in place."""
        opts = options(AllreduceCoalescedOptions, ("op", "timeout"), args, given)
        found = some("all_reduce", [tensors] if isinstance(tensors, torch.Tensor) else tensors)
        return self._launch(found[0], _reduce_in_place(found, opts.reduceOp), found, opts)

    @dispatched("reduce", 1)
    def reduce(self, tensors: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """The tensor reduced over the ranks, on rank `root`, in place."""
        opts = options(ReduceOptions, ("root", "op", "timeout"), args, given)
        tensor, root = one("reduce", tensors), self._checked_root("reduce", opts.rootRank)
        op = reduce_op("reduce", opts.reduceOp, [tensor])

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            buffer = staging.inp(tensor)
            reduced(comm, stream, staging, buffer, op, root)
            if comm.rank == root:
                staging.copy_out(tensor, buffer)

        return self._launch(tensor, call, [tensor], opts)

    @dispatched("barrier", 0)
    def barrier(self, *args: Any, **given: Any) -> ProcessGroupWork:
        """Done once every rank has called it. On `opts.device`; if torch gives none, on the host."""
        opts = options(BarrierOptions, ("timeout",), args, given)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            comm.barrier(stream=stream)

        lane = self._lane(opts.device or torch.device("cpu"))
        return self._note(lane.call(call, [], is_async=opts.asyncOp, blocks=True))

    # ------------------------------------------------------------------ gathers and scatters

    @dispatched("all_gather", 2)
    def allgather(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Every rank's tensor, in a list in rank order."""
        opts = options(AllgatherOptions, ("timeout",), args, given)
        inp = one("all_gather", inputs)
        outs = row("all_gather", outputs, self.size(), inp)
        if all(out.numel() == inp.numel() for out in outs):
            return self._launch(inp, _gather_into_lists([(outs, inp)]), outs, opts)
        if not all(out.numel() == outs[0].numel() for out in outs) and outs[self.rank()].numel() == inp.numel():
            return self._launch(inp, self._gather_uneven(outs, inp), outs, opts)
        raise ValueError(
            f"all_gather: expected output tensors of {inp.numel()} elements, or of as many as each rank sends; found "
            f"{[out.numel() for out in outs]}"
        )

    def _gather_uneven(self, outs: Tensors, inp: torch.Tensor) -> Any:
        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            sent = staging.joined([inp] * comm.size)
            received = staging.new(sum(out.numel() for out in outs), inp)
            sizes = [out.numel() for out in outs]
            comm.all_to_all(received, sent, sizes, [inp.numel()] * comm.size, stream=stream)
            staging.copy_parts(outs, received)

        return call

    @dispatched("all_gather", 2)
    def allgather_coalesced(self, output_lists: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Every rank's tensors, each in a list in rank order.

        output_lists: one list for each rank, with a tensor for each input.
        """
        opts = options(AllgatherOptions, ("timeout",), args, given)
        found = some("all_gather", inputs)
        if len(output_lists) != self.size():
            raise ValueError(f"all_gather: expected {self.size()} lists, one for each rank, found {len(output_lists)}")
        pairs = []
        for at, inp in enumerate(found):
            outs = row("all_gather", [each[at] for each in output_lists], self.size(), inp)
            equal_sizes("all_gather", outs, inp)
            pairs.append((outs, inp))
        return self._launch(found[0], _gather_into_lists(pairs), [out for outs, _ in pairs for out in outs], opts)

    @dispatched("all_gather", 2)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Every rank's tensors, each one after the other in rank order in a tensor of its own."""
        opts = options(AllgatherOptions, ("timeout",), args, given)
        outs, inps = some("all_gather", outputs), some("all_gather", inputs)
        for out, inp in zip(outs, inps, strict=True):
            if out.dtype != inp.dtype or out.numel() != self.size() * inp.numel():
                raise ValueError(
                    f"all_gather: expected an output of {self.size()} * {inp.numel()} elements of {inp.dtype}, found "
                    f"{out.numel()} of {out.dtype}"
                )

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            for out, inp in zip(outs, inps, strict=True):
                received = staging.out(out)
                comm.all_gather(received, staging.inp(inp), stream=stream)
                staging.copy_out(out, received)

        return self._launch(outs[0], call, outs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @dispatched("all_gather", 2)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **given: Any) -> ProcessGroupWork:
        """Every rank's tensor, one after the other in rank order, in one tensor."""
        return self.all_gather_single_coalesced([output], [input], *args, **given)

    _allgather_base = all_gather_single

    @dispatched("gather", 2)
    def gather(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Every rank's tensor, in a list in rank order, on rank `root`; elsewhere the list is empty."""
        opts = options(GatherOptions, ("root", "timeout"), args, given)
        inp, root = one("gather", inputs), self._checked_root("gather", opts.rootRank)
        outs = self._of_root("gather", outputs, root, inp)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            received = staging.new(comm.size * inp.numel(), inp) if outs else None
            comm.gather(received, staging.inp(inp), root, stream=stream)
            if received is not None:
                staging.copy_parts(outs, received)

        return self._launch(inp, call, outs, opts)

    @dispatched("scatter", 2)
    def scatter(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Tensor r of rank `root`'s list, on rank r; elsewhere the list is empty."""
        opts = options(ScatterOptions, ("root", "timeout"), args, given)
        out, root = one("scatter", outputs), self._checked_root("scatter", opts.rootRank)
        inps = self._of_root("scatter", inputs, root, out)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            received = staging.out(out)
            comm.scatter(received, staging.joined(inps) if inps else None, root, stream=stream)
            staging.copy_out(out, received)

        return self._launch(out, call, [out], opts)

    def _of_root(self, name: str, lists: Any, root: int, like: torch.Tensor) -> Tensors:
        """The root's list of tensors; none elsewhere."""
        if self.rank() != root:
            if any(True for each in lists for _ in (each if not isinstance(each, torch.Tensor) else [each])):
                raise ValueError(f"{name}: requires empty list on non-root, rank {self.rank()}; the root is rank {root}")
            return []
        found = row(name, lists, self.size(), like)
        equal_sizes(name, found, like)
        return found

    # ------------------------------------------------------------------ reductions of parts, and exchanges

    @dispatched("reduce_scatter", 2)
    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Tensor r of the ranks' lists, reduced over them, on rank r."""
        opts = options(ReduceScatterOptions, ("op", "timeout"), args, given)
        out = one("reduce_scatter", outputs)
        inps, op = row("reduce_scatter", inputs, self.size(), out), reduce_op("reduce_scatter", opts.reduceOp, [out])
        if inps[self.rank()].numel() != out.numel():
            raise ValueError(
                f"reduce_scatter: expected an output of {inps[self.rank()].numel()} elements, as many as tensor {self.rank()} "
                f"of the list has, found {out.numel()}"
            )
        if all(inp.numel() == out.numel() for inp in inps):
            return self._launch(out, _reduce_lists(out, inps, op), [out], opts)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            whole = staging.joined(inps)
            all_reduced(comm, stream, staging, whole, op)
            first = sum(inp.numel() for inp in inps[: comm.rank])
            staging.copy_parts([out], whole[first : first + out.numel()])

        return self._launch(out, call, [out], opts)

    @dispatched("reduce_scatter", 2)
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Of each tensor, block r, reduced over the ranks, on rank r."""
        opts = options(ReduceScatterOptions, ("op", "timeout"), args, given)
        outs, inps = some("reduce_scatter", outputs), some("reduce_scatter", inputs)
        op = reduce_op("reduce_scatter", opts.reduceOp, outs)
        for out, inp in zip(outs, inps, strict=True):
            if out.dtype != inp.dtype or inp.numel() != self.size() * out.numel():
                raise ValueError(
                    f"reduce_scatter: expected an input of {self.size()} * {out.numel()} elements of {out.dtype}, found "
                    f"{inp.numel()} of {inp.dtype}"
                )

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            for out, inp in zip(outs, inps, strict=True):
                received = staging.out(out)
                reduce_scattered(comm, stream, staging, received, staging.inp(inp), op)
                staging.copy_out(out, received)

        return self._launch(outs[0], call, outs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @dispatched("reduce_scatter", 2)
    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, *args: Any, **given: Any
    ) -> ProcessGroupWork:
        """Block r of the tensor, reduced over the ranks, on rank r."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], *args, **given)

    _reduce_scatter_base = reduce_scatter_single

    @dispatched("all_to_all", 2)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **given: Any,
    ) -> ProcessGroupWork:
        """Part p of the input goes to rank p, part p of the output comes from it.

        Sizes: rows of dim 0; empty for equal parts.
        """
        opts = options(AllToAllOptions, ("timeout",), args, given)
        out, sent = dense("all_to_all", output), dense("all_to_all", input)
        coming = counts("all_to_all", out, output_split_sizes, self.size())
        going = counts("all_to_all", sent, input_split_sizes, self.size())

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            received = staging.out(out)
            comm.all_to_all(received, staging.inp(sent), coming, going, stream=stream)
            staging.copy_out(out, received)

        return self._launch(out, call, [out], opts)

    alltoall_base = all_to_all_single

    @dispatched("all_to_all", 2)
    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **given: Any) -> ProcessGroupWork:
        """Tensor p of the inputs goes to rank p, tensor p of the outputs comes from it."""
        opts = options(AllToAllOptions, ("timeout",), args, given)
        like = one("all_to_all", inputs[:1])
        inps, outs = row("all_to_all", inputs, self.size(), like), row("all_to_all", outputs, self.size(), like)

        def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
            received = staging.new(sum(out.numel() for out in outs), like)
            sizes = [out.numel() for out in outs], [inp.numel() for inp in inps]
            comm.all_to_all(received, staging.joined(inps), *sizes, stream=stream)
            staging.copy_parts(outs, received)

        return self._launch(like, call, outs, opts)

    # ------------------------------------------------------------------ messages

    @dispatched("send", 1)
    def send(self, tensors: Any, dst: int, tag: int = 0) -> ProcessGroupWork:
        """Send the tensor to rank `dst`, which receives it with the same tag."""
        tensor = one("send", tensors)
        return self._note(self._lane(tensor.device).send(tensor, self._checked_root("send", dst), tag))

    @dispatched("recv", 1)
    def recv(self, tensors: Any, src: int, tag: int = 0) -> ProcessGroupWork:
        """Receive the tensor from rank `src`, which sends it with the same tag."""
        tensor = one("recv", tensors)
        return self._note(self._lane(tensor.device).recv(tensor, self._checked_root("recv", src), tag))

    @dispatched("recv", 1)
    def recv_anysource(self, tensors: Any, tag: int = 0) -> ProcessGroupWork:
        """Receive the tensor from whichever rank sends one with this tag: `Work.source_rank` says which."""
        tensor = one("recv", tensors)
        return self._note(self._lane(tensor.device).recv(tensor, None, tag))

    # ------------------------------------------------------------------ launching

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> ProcessGroupWork:
        works, self._together = self._together or [], None
        parts = [part for work in works for part in work.parts]
        return ProcessGroupWork(parts, [tensor for work in works for tensor in work.result()], torch.device(device))

    def _note(self, work: ProcessGroupWork) -> ProcessGroupWork:
        if self._together is not None:
            self._together.append(work)
        return work

    def _launch(self, like: torch.Tensor, call: Any, result: Tensors, opts: Any) -> ProcessGroupWork:
        return self._note(self._lane(like.device).call(call, result, is_async=opts.asyncOp))

    def _lane(self, device: torch.device) -> HostLane | DeviceLane:
        kind = torch.device(device).type
        if not self._lanes:
            raise RuntimeError(f"process group '{self._name}': it was destroyed")
        if kind not in self._lanes:
            raise ValueError(
                f"process group '{self._name}' on rank {self.rank()}: expected tensors on {' or '.join(self._lanes)}, found "
                f"one on {kind}; the device of the world is chosen by init_process_group(device=...)"
            )
        return self._lanes[kind]

    def _checked_root(self, name: str, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"{name}: invalid rank {rank}: expected a rank of the group, below {self.size()}")
        return rank


def _reduce_in_place(tensors: Tensors, torch_op: Any) -> Any:
    op = reduce_op("all_reduce", torch_op, tensors)

    def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
        for tensor in tensors:
            buffer = staging.inp(tensor)
            all_reduced(comm, stream, staging, buffer, op)
            staging.copy_out(tensor, buffer)

    return call


def _gather_into_lists(pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> Any:
    def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
        for outs, inp in pairs:
            received = staging.new(comm.size * inp.numel(), inp)
            comm.all_gather(received, staging.inp(inp), stream=stream)
            staging.copy_parts(outs, received)

    return call


def _reduce_lists(out: torch.Tensor, inps: Tensors, op: Any) -> Any:
    def call(comm: Communicator, stream: Stream, staging: Staging) -> None:
        received = staging.out(out)
        reduce_scattered(comm, stream, staging, received, staging.joined(inps), op)
        staging.copy_out(out, received)

    return call
