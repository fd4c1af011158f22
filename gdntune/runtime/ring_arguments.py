"""What a call behind a ring has beside gates and delta rule."""

import dataclasses
from typing import Any

import torch

from gdntune.errors import UnsupportedProblem, listed
from gdntune.kernels.spec import RING_ARGUMENTS
from gdntune.problem import RINGS, Contract, check_contract
from gdntune.runtime.contracts import DTYPES


@dataclasses.dataclass(frozen=True)
class Rings:
    """What `contracts.Layer` says of a layer's call, of one behind a ring."""

    ring_k: Any
    ring_u: Any
    ring_decay: Any
    ring_base: Any
    ring_count: Any
    ring_seed: Any
    output_gate: Any
    norm_weight: Any
    capacity: Any
    flush_min: Any
    append: Any
    norm: Any
    norm_eps: Any

    # a layer's, which has gradients
    conv_state: None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """Its tensors by name."""
        names = (*RING_ARGUMENTS[:5], "output_gate", "norm_weight")
        return {name: getattr(self, name) for name in names}

    @property
    def values(self) -> tuple[Any, ...]:
        """What a compiled function takes behind a call's numbers."""
        found = numbers(self.capacity, self.flush_min, self.append)
        ring = (getattr(self, name) for name in RING_ARGUMENTS[:5])
        own = (*ring, *found, self.ring_seed)
        if self.norm == "none":
            return own
        return (*own, self.output_gate, plain(self.norm_weight), float(self.norm_eps))

    def contract(self, inner: Contract) -> Contract:
        """The contract of a call whose gates and delta rule are those of another."""
        if type(self.capacity) is not int or self.capacity not in RINGS:
            raise UnsupportedProblem(f"capacity={self.capacity!r}: expected one of {listed(RINGS)}")
        if self.ring_u.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedProblem(
                f"ring_u has dtype {self.ring_u.dtype}: expected torch.float32 or torch.bfloat16"
            )
        dtype: Any = DTYPES[self.ring_u.dtype]
        rounding: Any = "nearest" if self.ring_seed is None else "stochastic"
        behind: dict[str, Any] = {}
        if self.norm != "none":
            weight = self.norm_weight.dtype
            if weight not in DTYPES:
                raise UnsupportedProblem(
                    f"norm_weight has dtype {weight}: expected one of {listed(DTYPES)}"
                )
            behind = {"norm": self.norm, "norm_weight_dtype": DTYPES[weight]}
        return check_contract(
            inner.replace(ring=self.capacity, ring_dtype=dtype, ring_rounding=rounding, **behind)
        )


def plain(weight: Any) -> Any:
    """A model's parameter as DLPack takes it: without a gradient."""
    return weight.detach() if weight.requires_grad else weight


def numbers(capacity: Any, flush_min: Any, append: Any) -> tuple[int, int]:
    """The numbers of a ring as compiled functions take them; flush_min None: as late as may be."""
    least = capacity + 1 if flush_min is None else flush_min
    if type(least) is not int or not 0 <= least <= capacity + 1:
        raise UnsupportedProblem(
            f"flush_min={flush_min!r}: expected None or an integer from 0 to capacity + 1 ="
            f" {capacity + 1}"
        )
    return least, int(bool(append))
