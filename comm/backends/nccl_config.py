"""`ncclConfig_t` as CuPy 14.2 passes it: its `NcclConfig` holds the whole structure, and gives access to one field.

NCCL reads as many bytes as the structure's `size` says, and takes its defaults for fields that are newer than `version`, so the
structure of 2.27, with which CuPy is built, serves later versions as well (as in NCCL's sources of 2.31).
"""

from __future__ import annotations

from ctypes import Structure, c_char_p, c_int, c_size_t, c_uint, sizeof
from dataclasses import dataclass, field
from typing import Any

from ..nccl_policy import CTA_POLICIES, NcclPolicy

_MAGIC = 0xCAFE_BEEF
UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class Config(Structure):
    """The fields of NCCL 2.27."""

    size: int
    magic: int
    minCTAs: int
    maxCTAs: int
    CTAPolicy: int
    _fields_ = (
        *(("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cgaClusterSize", c_int)),
        *(("minCTAs", c_int), ("maxCTAs", c_int), ("netName", c_char_p), ("splitShare", c_int), ("trafficClass", c_int)),
        *(("commName", c_char_p), ("collnetEnable", c_int), ("CTAPolicy", c_int), ("shrinkShare", c_int), ("nvlsCTAs", c_int)),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What a backend has in common with those that are split from it.

    first: by their ranks, the communicators of NCCL that were made first, and are open; further ones are split from these.
    """

    policy: NcclPolicy
    first: dict[tuple[int, ...], Any] = field(default_factory=dict)


def configure(made: Any, policy: NcclPolicy) -> None:
    """Write the policy into a new `NcclConfig` of CuPy's. Raises RuntimeError where that is laid out otherwise."""
    if policy == NcclPolicy(share_resources=policy.share_resources):
        return
    config = view(made)
    config.CTAPolicy = UNDEFINED if policy.cta_policy == "default" else CTA_POLICIES[policy.cta_policy]
    config.minCTAs = UNDEFINED if policy.min_ctas is None else policy.min_ctas
    config.maxCTAs = UNDEFINED if policy.max_ctas is None else policy.max_ctas


def view(made: Any) -> Config:
    """The structure inside of an `NcclConfig`: it follows the header of the Python object."""
    header = object.__basicsize__
    if type(made).__basicsize__ == header + sizeof(Config):
        config = Config.from_address(id(made) + header)
        if (config.size, config.magic) == (sizeof(Config), _MAGIC):
            return config
    raise RuntimeError(
        f"{type(made)} does not hold NCCL's configuration as that of CuPy 14.2 does: cta_policy, min_ctas and max_ctas of "
        "NcclPolicy cannot be set; use CuPy 14.2, or the variables NCCL_CTA_POLICY, NCCL_MIN_CTAS and NCCL_MAX_CTAS"
    )
