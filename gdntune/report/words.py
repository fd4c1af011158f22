"""The words and numbers of reports: contracts, cells, times and ratios, each said in one way."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gdntune.problem import Contract
from gdntune.results.records import NOISY

MISSING = "-"
# What stands before a number that cannot be believed.
NOISE_MARK = "~"
# And before one that was taken at the device's power limit.
POWER_MARK = "^"


def contract_words(c: Contract) -> str:
    """A contract without T, as a heading says it."""
    said = ("op", "tokens", "state_dtype", "input_dtype", "mode")
    rest = [
        part for part in c.key().split(".") if "=" in part and part.partition("=")[0] not in said
    ]
    return ", ".join(
        [c.op, f"{c.state_dtype} state", f"{c.input_dtype} input", f"mode {c.mode}", *rest]
    )


def contract_form(c: Contract) -> str:
    """A contract's op, state and what it writes, in a few words."""
    between = "" if c.intermediate == "none" else f" {c.intermediate}"
    return f"{c.op.removesuffix('_decode')} {c.state_dtype} {c.mode}{between}"


def contract_rest(c: Contract) -> str:
    """What is unusual of a contract beside its form and T, in a few words."""
    usual = Contract(op=c.op, gate="raw" if c.op == "gdn_decode" else "softplus")
    said = {
        "K": f"K={c.K}",
        "V": f"V={c.V}",
        "layout": "V-last",
        "input_dtype": f"{c.input_dtype} inputs",
        "gate": f"{c.gate} gate",
        "gate_dtype": f"{c.gate_dtype} gate",
        "beta": "beta given",
        "beta_dtype": f"{c.beta_dtype} beta",
        "A_log_dtype": f"A_log {c.A_log_dtype}",
        "dt_bias_dtype": f"dt_bias {c.dt_bias_dtype}",
        "pool": "no pool",
        "ragged": "ragged",
        "accepted": "accepted",
        "norm": f"{c.norm} norm",
        "norm_weight_dtype": f"norm weight {c.norm_weight_dtype}",
        "conv": f"convolution ({c.conv})",
        "conv_width": f"of width {c.conv_width}",
        "conv_bias": "with a bias",
        "conv_window": "windows shifted" + ", dims first" * (c.conv_window == "dims_first"),
        "conv_input": "rows interleaved by q/k head",
        "ring": f"a ring of {c.ring}",
        "ring_dtype": f"u {c.ring_dtype}",
        "ring_rounding": f"{c.ring_rounding} rounding",
    }
    return ", ".join(
        words for name, words in said.items() if getattr(c, name) != getattr(usual, name)
    )


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in order, runs of three and more by their ends: `1-4,8`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)


def number(us: float) -> str:
    """A time in four digits."""
    return (
        MISSING
        if math.isnan(us)
        else f"{us:.2f}"
        if us < 100
        else f"{us:.1f}"
        if us < 1000
        else f"{us:.0f}"
    )


def size_names(sizes: Sequence[tuple[int, int, int]]) -> list[str]:
    """Cells by B, HV and H, each as `B x HV`; with its H where others have the same B and HV."""
    alike = Counter((B, HV) for B, HV, _ in sizes)
    return [f"{B} x {HV}{f', H={H}' if alike[B, HV] > 1 else ''}" for B, HV, H in sizes]


def ratio(value: float) -> str:
    """A ratio of times."""
    return MISSING if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


# What the marks behind a share stand for: 106% of a peak asks for a reason.
SHARE_MARKS = {
    "c": "c: L2-assisted. Part of the state may have stayed in the cache, so a share can be above"
    " 100; it says little of the DRAM.",
    "l": "l: latency-bound. Fixed costs of the launch decide, not the DRAM.",
}


def bound_mark(bound: str) -> str:
    """What stands after a share: ` l` where fixed costs decide, ` c` where the cache may have
    helped.
    """
    return {"latency-bound": " l", "L2-assisted": " c"}.get(bound, "  ")


def is_noisy(cell: Any) -> bool:
    """Whether the times of a frame's row cannot be believed."""
    return str(cell["reason"]).startswith(NOISY)


def marked(cell: Any, said: str) -> str:
    """What a table says of a frame's row, marked where its times cannot be believed, or were taken
    at the device's power limit.
    """
    if said == MISSING:
        return said
    marks = (NOISE_MARK if is_noisy(cell) else "") + (POWER_MARK if cell["power_capped"] else "")
    return f"{marks}{said}"


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs))


def contract_short(cell: Any) -> str:
    """The contract of a frame's row, with what is usual left out."""
    extra = (
        ""
        if cell["mode"] == "update" and cell["intermediate"] == "none"
        else f" {cell['mode']} {cell['intermediate']}"
    )
    return f"{cell['op']} T={cell['tokens']} {cell['state_dtype']}{extra}"


def cell_words(cell: Any) -> str:
    """The cell of a frame's row."""
    said = f"{contract_short(cell)}, B={cell['B']}, HV={cell['HV']}"
    noisy = ", noisy" if is_noisy(cell) else ""
    return f"{said}{noisy}{', at the power limit' if cell['power_capped'] else ''}"
