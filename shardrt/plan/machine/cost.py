"""What an operation and a collective cost on a machine, by its hardware sheet.

An operation takes an overhead, and then the longer of its arithmetic and its memory traffic (the roofline: Williams, Waterman,
Patterson 2009). A collective takes a latency for each step from rank to rank, and the longer of what it moves within the node
and across nodes, each by its link (alpha and beta: Thakur, Rabenseifner, Gropp 2005). The calls of a group share their latency.

N ranks, k of them on this rank's node, m nodes; S bytes of all blocks, as nccl-tests counts them; received on this rank:

| collective                  | received             | of it, across nodes | steps: within, across                    |
|-----------------------------|----------------------|---------------------|------------------------------------------|
| all_gather, reduce_scatter  | S (N - 1) / N        | S (N - 1) / N / k   | N - m, m - 1 (a ring)                    |
| all_reduce                  | 2 S (N - 1) / N      | 2 S (m - 1) / m / k | 2 (k - 1), 2 log2 m (chains and a tree)  |
| broadcast, reduce           | S, on the root 0 / S | S / k               | log2 k, log2 m (a tree)                  |
| all_to_all                  | S (N - 1) / N        | S (N - k) / N       | k - 1, N - k (pairwise)                  |
| gather, scatter             | S (N - 1) / N, S / N | S (N - k) / N, -    | k - 1, N - k, at the root's speed        |

These rings visit one rank of a node after the other, with a ring for each rank of a node, so that all their network ports take
part: a ring has S / k of the bytes, of which each of its links carries all but one block, also those between nodes: a rank's
block goes around the other nodes and comes back, for the ranks of its node that are before it in the ring. A tree sends across
nodes only what other nodes need. That is what NCCL does; steps are those of its own model (src/graph/tuning.cc). Ranks that
share a node are neighbours in a communicator, as in parts of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ...comm.core.calls import CollectiveCall, Member
from .hardware import NetworkLink, Sheet, SheetError
from .work import OperationWork


class Bound(Enum):
    """What limits a step, or a part of it."""

    ARITHMETIC = "arithmetic"
    MEMORY = "memory bandwidth"
    OVERHEAD = "overhead of operations"
    LATENCY = "latency of collectives"
    WITHIN = "links within nodes"
    ACROSS = "links across nodes"


UNLAUNCHED = 0.25  # one without a kernel, such as a view or an allocation, takes this part of the host's time for one
COMMUNICATION = (Bound.LATENCY, Bound.WITHIN, Bound.ACROSS)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes within the node and across nodes, and steps from rank to rank, of one collective.

    received: by this rank.   moved: in the direction and on the rank that has most to move.
    """

    received_within: float = 0.0
    received_across: float = 0.0
    moved_within: float = 0.0
    moved_across: float = 0.0
    steps_within: int = 0
    steps_across: int = 0

    @classmethod
    def of(cls, within: float, across: float, steps_within: int, steps_across: int, received: float = 1.0) -> Traffic:
        """Make the traffic of a rank. received: the part of the bytes that this rank receives."""
        return cls(within * received, across * received, within, across, steps_within, steps_across)


@dataclass(frozen=True, slots=True)
class RanksOnNodes:
    """Where a communicator's ranks are: N of them, k on this rank's node, on m nodes."""

    size: int
    on_node: int
    nodes: int

    @classmethod
    def of(cls, comm: Member, per_node: int) -> RanksOnNodes:
        """Find them for a communicator. per_node: ranks of the world on a node. Cost: that many looks at `comm.ranks`."""
        node, first, last = comm.ranks[comm.rank] // per_node, comm.rank, comm.rank
        while first > 0 and comm.ranks[first - 1] // per_node == node:
            first -= 1
        while last + 1 < comm.size and comm.ranks[last + 1] // per_node == node:
            last += 1
        on_node = last + 1 - first
        return cls(comm.size, on_node, math.ceil(comm.size / on_node))


def traffic_of(call: CollectiveCall, per_node: int) -> Traffic:
    """What one collective moves. per_node: ranks of the world on a node."""
    place = RanksOnNodes.of(call.comm, per_node)
    size, on_node, nodes = place.size, place.on_node, place.nodes
    nbytes, is_root = call_nbytes(call), call.comm.rank in call.args
    whole = nbytes * (size - 1) / size  # all blocks but the rank's own
    log_within, log_across = (math.ceil(math.log2(number)) for number in (on_node, nodes))
    match call.name:
        case "all_gather" | "reduce_scatter":
            across = whole / on_node if nodes > 1 else 0.0
            return Traffic.of(whole - across, across, size - nodes, nodes - 1)
        case "all_reduce":
            across = 2 * nbytes * (nodes - 1) / nodes / on_node
            return Traffic.of(max(0.0, 2 * whole - across), across, 2 * (on_node - 1), 2 * log_across)
        case "broadcast" | "reduce":
            across = nbytes / on_node if nodes > 1 else 0.0
            keeps = float(is_root == (call.name == "reduce"))
            return Traffic.of(nbytes - across if size > 1 else 0.0, across, log_within, log_across, keeps)
        case "all_to_all" | "gather" | "scatter":
            within, across = nbytes * (on_node - 1) / size, nbytes * (size - on_node) / size
            received = 1.0 if call.name == "all_to_all" else _rooted_share(call.name, is_root, size)
            return Traffic.of(within, across, on_node - 1, size - on_node, received)
        case "send" | "recv":
            return _message(call, nbytes, per_node)
    return Traffic.of(0.0, 0.0, 2 * log_within, 2 * log_across)  # a barrier


def call_nbytes(call: CollectiveCall) -> int:
    """S: of the larger of `out` and `inp`, which is all blocks, where a collective has several."""
    return max(tensor.nbytes if tensor is not None else 0 for tensor in (call.out, call.inp))


def _rooted_share(name: str, is_root: bool, size: int) -> float:
    """The part of a gather's or scatter's bytes that this rank receives."""
    return float(is_root) if name == "gather" else 0.0 if is_root else 1 / max(1, size - 1)


def _message(call: CollectiveCall, nbytes: float, per_node: int) -> Traffic:
    peer, ranks = call.args[0], call.comm.ranks
    assert isinstance(peer, int)
    is_near = ranks[peer] // per_node == ranks[call.comm.rank] // per_node
    within, across = (nbytes, 0.0) if is_near else (0.0, nbytes)
    return Traffic.of(within, across, int(is_near), int(not is_near), float(call.name == "recv"))


class Costs:
    """Seconds and bytes on a machine. per_node: ranks on a node, where not all of the sheet's.

    spent: seconds by what they were bound by, of all that was asked for; whoever begins a step clears it.
    launch_seconds: the host's time for one operation beside the device; 0 where the host is the device, and `kernel` has it.
    """

    def __init__(self, sheet: Sheet, per_node: int | None = None) -> None:
        self.sheet = sheet
        self.per_node = per_node or sheet.ranks_per_node
        self.spent = dict.fromkeys(Bound, 0.0)
        self.is_host = sheet.device == "cpu"
        self.launch_seconds = 0.0 if self.is_host else sheet.overhead.operation

    def kernel(self, work: OperationWork) -> float:
        """The seconds of work on the device; on the host, with the time to call it."""
        sheet = self.sheet
        overhead = sheet.overhead.operation if self.is_host else sheet.overhead.kernel
        if not work.is_launched:
            overhead *= UNLAUNCHED if self.is_host else 0.0
        flops = sheet.compute.flops.get(str(work.dtype).removeprefix("torch."), sheet.compute.flops["float32"])
        arithmetic = 0.0
        if work.scored and sheet.compute.attention is not None:
            arithmetic = work.scored / max(flops.rates) / sheet.compute.attention
        elif work.flops:
            arithmetic = work.flops / flops.rate(work.flops / max(1, work.nbytes)) / sheet.compute.fraction
        arithmetic = max(arithmetic, work.functions / sheet.compute.functions)
        memory = sheet.memory.bandwidth.seconds(work.nbytes) / sheet.memory.fraction
        self.spent[Bound.OVERHEAD] += overhead
        self.spent[Bound.ARITHMETIC if arithmetic > memory else Bound.MEMORY] += max(arithmetic, memory)
        return overhead + max(arithmetic, memory)

    def traffic(self, calls: Sequence[CollectiveCall]) -> Traffic:
        """What a call, or the calls of a group, move together."""
        every = [(call.name, traffic_of(call, self.per_node)) for call in calls]
        ways = [[t for name, t in every if name == "send"], [t for name, t in every if name != "send"]]  # at once
        return Traffic(
            sum(traffic.received_within for _, traffic in every),
            sum(traffic.received_across for _, traffic in every),
            max(sum(traffic.moved_within for traffic in way) for way in ways),
            max(sum(traffic.moved_across for traffic in way) for way in ways),
            max(traffic.steps_within for _, traffic in every),
            max(traffic.steps_across for _, traffic in every),
        )

    def collective(self, calls: Sequence[CollectiveCall]) -> float:
        """The seconds of a call, or of the calls of a group, on their stream. Raises SheetError if [across] is missing."""
        if self._are_measured(calls):
            return self._measured(calls)
        traffic, link = self.traffic(calls), self.sheet.within
        latency = link.start + traffic.steps_within * link.latency
        within, across = _link_seconds(link, traffic.moved_within), 0.0
        if traffic.steps_across:
            far = self._across()
            latency += max(0.0, far.start - link.start) + traffic.steps_across * far.latency
            across = _link_seconds(far, traffic.moved_across)
        if calls[0].comm.size == 1:
            nbytes = sum(map(call_nbytes, calls))  # a rank alone reads and writes them
            within = 2 * self.sheet.memory.bandwidth.seconds(nbytes) / self.sheet.memory.fraction
        self.spent[Bound.LATENCY] += latency
        self.spent[Bound.ACROSS if across > within else Bound.WITHIN] += max(within, across)
        return latency + max(within, across)

    def _are_measured(self, calls: Sequence[CollectiveCall]) -> bool:
        """True if all calls are in [collectives], and within the node."""
        return all(call.name in self.sheet.collectives for call in calls) and all(
            RanksOnNodes.of(call.comm, self.per_node).nodes == 1 for call in calls
        )

    def _measured(self, calls: Sequence[CollectiveCall]) -> float:
        """The seconds by [collectives]."""
        links = [self.sheet.collectives[call.name] for call in calls]
        latency = max(link.latency for link in links)
        within = sum(_link_seconds(link, call_nbytes(call)) for link, call in zip(links, calls, strict=True))
        self.spent[Bound.LATENCY] += latency
        self.spent[Bound.WITHIN] += within
        return latency + within

    def _across(self) -> NetworkLink:
        if self.sheet.across is None:
            raise SheetError(
                f"hardware sheet '{self.sheet.name}' has no [across], and a collective spans several nodes of {self.per_node} "
                "ranks: add bandwidth and latency of the links between nodes"
            )
        return self.sheet.across


def _link_seconds(link: NetworkLink, nbytes: float) -> float:
    return link.bandwidth.seconds(nbytes) / link.fraction


def bounding(spent: Mapping[Bound, float], step_seconds: float, exposed_seconds: float) -> dict[Bound, float]:
    """The parts of a step by what bounds them, from the largest on; they add up to 1.

    spent: of `Costs`.   exposed_seconds: of the step, those in which computation waits for communication. What communication is
    bound by has a part of those only; the rest of the step goes to what computation is bound by.
    """
    parts: dict[Bound, float] = {}
    for kinds, seconds in (
        (COMMUNICATION, exposed_seconds),
        ([bound for bound in Bound if bound not in COMMUNICATION], step_seconds - exposed_seconds),
    ):
        total = sum(spent[bound] for bound in kinds)
        parts |= {bound: seconds / step_seconds * spent[bound] / total if total else 0.0 for bound in kinds}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))
