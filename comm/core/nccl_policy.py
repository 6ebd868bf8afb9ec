"""How NCCL's communicators are made: strategy as data. The defaults change nothing."""

from __future__ import annotations

from dataclasses import dataclass

CTA_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}  # NCCL_CTA_POLICY_*


@dataclass(frozen=True, slots=True)
class NcclPolicy:
    """The configuration of all communicators of a job. None, or "default", leaves a choice to NCCL and its variables.

    share_resources: let the communicators over the same ranks share buffers, connections and the proxy's thread. It saves
        memory; their collectives then run one after the other, as those of one communicator: nothing is reduced while
        parameters are gathered.
    cta_policy: "efficiency" takes fewer thread blocks for the same bandwidth, from NCCL 2.27 on; "zero" copies by copy engines
        where NCCL can, between symmetric windows, from 2.28 on.
    min_ctas, max_ctas: thread blocks of a collective, at least and at most; each takes a multiprocessor from compute.
    Raises ValueError for another policy, and numbers that are not 1 <= min_ctas <= max_ctas.
    """

    share_resources: bool = False
    cta_policy: str = "default"
    min_ctas: int | None = None
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        if self.cta_policy not in CTA_POLICIES:
            raise ValueError(f"NcclPolicy(cta_policy={self.cta_policy!r}): expected one of {', '.join(CTA_POLICIES)}")
        given = [number for number in (self.min_ctas, self.max_ctas) if number is not None]
        if any(type(number) is not int or number < 1 for number in given) or given != sorted(given):
            found = f"min_ctas={self.min_ctas!r}, max_ctas={self.max_ctas!r}"
            raise ValueError(f"NcclPolicy({found}): expected 1 <= min_ctas <= max_ctas, or None")
