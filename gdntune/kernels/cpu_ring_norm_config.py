"""Knobs of `cpu_ring_norm`: `cpu_ring`'s one setting."""

import dataclasses

from gdntune.kernels import cpu_ring_config
from gdntune.kernels.spec import Facts
from gdntune.problem import Contract


def facts(c: Contract) -> Facts:
    """What an object is compiled for; the dtypes of u and of the weight their tensors tell."""
    return {**cpu_ring_config.facts(c), "norm": c.norm}


KERNEL = dataclasses.replace(
    cpu_ring_config.KERNEL,
    name="cpu_ring_norm",
    facts=facts,
    compiler="gdntune.kernels.cpu_ring_norm:compile",
    sources=("gdntune.kernels.cpu_ring_norm", "kernels/cpu/ring_norm.h"),
    layer=True,
)
