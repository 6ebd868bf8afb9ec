"""Strategy as frozen data, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """In which dtypes a group computes, reduces and returns. None keeps what is there.

    param_dtype: of the gathered parameters, hence of compute and of the gradients autograd makes.
    reduce_dtype: in which gradients are accumulated and reduced (default: param_dtype, else the parameters' own).
    output_dtype: to which floating-point outputs of the module's forward are cast.
    cast_forward_inputs: cast floating-point inputs of the module's forward to param_dtype.
    Raises ValueError for a dtype that is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a parameter of `dtype` is gathered: integers stay what they are."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy({name}={dtype}): expected a floating-point dtype or None")
