"""A layer's convolution and its gated norm as kernels of their own, of the same making as the fused one:
what `layer_gpu.py` times it against. Width 4, silu, bf16, V=128; windows are rings. And a kernel that
writes a call's inputs, and takes as long as it is told.
"""

import dataclasses
from typing import Any

from gdntune.kernels.spec import Kernel, knob

WIDTH, CHANNELS, THREADS, V = 4, 4, 64, 128


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting."""

    pdl: bool = knob("pdl", "starts before the kernel ahead ends, and waits for it", default=False)


def _kernel(name: str) -> Kernel:
    return Kernel(
        name=name,
        device="cuda",
        role="decode",
        knobs=Knobs,
        space=lambda contract, device: (Knobs(), Knobs(True)),
        refuse=lambda contract, setting: None,
        default=lambda contract, work_units, device: Knobs(),
        facts=lambda contract: {"part": name, "tokens": contract.tokens},
        compiler="layer_parts:compile",
        sources=("layer_parts", "layer_parts_cute"),
    )


CONV, NORM, PRODUCER = _kernel("part_conv"), _kernel("part_norm"), _kernel("part_producer")


def compile(facts: dict[str, Any], knobs: dict[str, Any], options: str, prefix: str) -> Any:
    """The compiled function of one part."""
    import layer_parts_cute as parts

    return parts.compiled(facts["part"], facts["tokens"], knobs["pdl"], options, prefix)
