"""What the kernels behind a ring of corrections share: a request's window, stand-ins for what they take
beside a decode kernel's tensors, and the compiled function.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from gdntune.kernels import decode


@dataclasses.dataclass(frozen=True)
class Live:
    """A request's window of a ring: `count` rows from `base` on, cyclically, of `rows`."""

    base: Any
    count: Any
    rows: Any

    @classmethod
    def clamped(cls, base, count, rows, most: int) -> "Live":
        """The window that a request names, within a ring of `rows` that keeps `most` entries: no count reaches memory beyond it."""
        return cls(
            cutlass.min(cutlass.max(base, 0), rows - 1),
            cutlass.min(cutlass.max(count, 0), cutlass.min(rows, most)),
            rows,
        )

    def place(self, i):
        """The row of entry i; those behind the live ones are where new tokens go."""
        at = self.base + i
        return Int64(cutlass.select_(at >= self.rows, at - self.rows, at))


def fakes(facts: dict, tensors: list) -> list:
    """Stand-ins for the ring's tensors; those of a decode kernel say the sizes. GDN's decay is a number a token and head, KDA's one a key
    element.
    """
    state, k, v, read_index = tensors[0], tensors[2], tensors[3], tensors[8]
    slots, rows = state.shape[0], cute.sym_int(symbol="ring_rows")
    stored = decode.DTYPES[facts["ring_dtype"]]
    decay = (facts["K"],) if facts["op"] == "kda_decode" else ()

    def kept(dtype, heads, *width):
        # 64-bit strides, as the state's; a row of 16 bytes and more may be loaded at once
        unit = 16 // (dtype.width // 8) if width else 1
        stride = (cute.sym_int64(divisibility=unit), cute.sym_int64(divisibility=unit), *width, 1)
        return make_fake_tensor(
            dtype, (slots, heads, rows, *width), stride, assumed_align=16 if width else 4
        )

    def index():
        return make_fake_tensor(Int32, read_index.shape, (cute.sym_int(),), assumed_align=4)

    return [
        kept(k.element_type, k.shape[2], facts["K"]),
        kept(stored, v.shape[2], facts["V"]),
        kept(Float32, v.shape[2], *decay),
        index(),
        index(),
    ]


def seed_of(facts: dict):
    """A stand-in for the seed, where the contract has one."""
    if facts["ring_rounding"] != "stochastic":
        return None
    return make_fake_tensor(Int32, (2,), (1,), assumed_align=4)


def arguments(facts: dict, tensors: list) -> list:
    """Stand-ins for all that a call behind a ring has but its stream; tensors: those of a decode kernel."""
    return [*tensors, *decode.SCALARS, *fakes(facts, tensors), Int32(1), Int32(1), seed_of(facts)]


def compiled(ring, facts: dict, options: str, prefix: str):
    """The function of a kernel's setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    given = arguments(facts, decode.fakes(facts))
    return decode.made(ring, ring.gated_delta_rule_ring, given, options, prefix)
