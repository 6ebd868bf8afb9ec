"""`ncclConfig_t` as CuPy 14.2 passes it: its `NcclConfig` holds the whole structure, and gives access to one field.

NCCL reads as many bytes as the structure's `size` says, and takes its defaults for fields that are newer than `version`, so an
older structure serves later versions as well (as in NCCL's sources of 2.31). CuPy's wheel for CUDA 12 is built with that of
2.25, its wheel for CUDA 13 with that of 2.27: fields were added at the end.
"""

from __future__ import annotations

from ctypes import Structure, c_char_p, c_int, c_size_t, c_uint
from dataclasses import dataclass, field
from typing import Any

from ...core.nccl_policy import CTA_POLICIES, NcclPolicy

_MAGIC = 0xCAFE_BEEF
UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class Config(Structure):
    """The fields of NCCL 2.27."""

    size: int
    magic: int
    _fields_ = (
        *(("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cgaClusterSize", c_int)),
        *(("minCTAs", c_int), ("maxCTAs", c_int), ("netName", c_char_p), ("splitShare", c_int), ("trafficClass", c_int)),
        *(("commName", c_char_p), ("collnetEnable", c_int), ("CTAPolicy", c_int), ("shrinkShare", c_int), ("nvlsCTAs", c_int)),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What a backend has in common with those that are split from it.

    first: the communicators of NCCL that were made first and are open, by their ranks; further ones are split from these.
    """

    policy: NcclPolicy
    first: dict[tuple[int, ...], Any] = field(default_factory=dict)


def configure(made: Any, policy: NcclPolicy) -> None:
    """Write the policy into a new `NcclConfig` of CuPy's. Raises RuntimeError where that has no such field."""
    given = {"minCTAs": policy.min_ctas, "maxCTAs": policy.max_ctas}
    if policy.cta_policy != "default":
        given["CTAPolicy"] = CTA_POLICIES[policy.cta_policy]
    wanted = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        return
    config = view(made)
    if "CTAPolicy" in wanted and config.size < Config.CTAPolicy.offset + Config.CTAPolicy.size:
        raise RuntimeError(
            "this CuPy was built with an NCCL before 2.27, whose configuration has no CTAPolicy: expected "
            "NcclPolicy(cta_policy='default'); use CuPy for CUDA 13, or the variable NCCL_CTA_POLICY"
        )
    for name, value in wanted.items():
        setattr(config, name, value)


def view(made: Any) -> Config:
    """The structure inside of an `NcclConfig`: it follows the header of the Python object. The last fields may be missing."""
    header = object.__basicsize__
    nbytes = type(made).__basicsize__ - header
    if nbytes >= Config.splitShare.offset + Config.splitShare.size:
        config = Config.from_address(id(made) + header)
        if (config.size, config.magic) == (nbytes, _MAGIC):
            return config
    raise RuntimeError(
        f"{type(made)} does not hold NCCL's configuration as that of CuPy 14.2 does: cta_policy, min_ctas and max_ctas of "
        "NcclPolicy cannot be set; use CuPy 14.2, or the variables NCCL_CTA_POLICY, NCCL_MIN_CTAS and NCCL_MAX_CTAS"
    )
