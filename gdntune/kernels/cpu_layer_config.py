"""Knobs of `cpu_layer`: `cpu_recurrent`'s, which decide all but what is around the delta rule."""

import dataclasses

from gdntune.kernels import cpu_recurrent_config
from gdntune.kernels.spec import Facts
from gdntune.problem import Contract


def facts(c: Contract) -> Facts:
    """What an object is compiled for; dtypes, taps, bias and the kind of window its tensors tell."""
    own = {"interleaved": True} if c.conv_input == "interleaved" else {}
    return {**cpu_recurrent_config.facts(c), "norm": c.norm, "conv": c.conv, **own}


KERNEL = dataclasses.replace(
    cpu_recurrent_config.KERNEL,
    name="cpu_layer",
    facts=facts,
    compiler="gdntune.kernels.cpu_layer:compile",
    sources=("gdntune.kernels.cpu_layer", "kernels/cpu/layer.h"),
    layer=True,
)
