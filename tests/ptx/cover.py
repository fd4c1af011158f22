"""Few cases that hold most pairs of choices, or all: contracts, what is awkward in a call, and knobs.

A row is one compiled kernel and one call of it. Rows are chosen so that whatever two values of two
fields can go together, do so in some row; a kernel's rows come from what it serves alone, so a new
kernel of the registry has rows without a line here.
"""

import functools
import operator
import os
import random
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels.spec import Kernel, Variant
from gdntune.problem import GATES, Contract, Problem, contract_fault

from .build import ARCH

FLOATS = ("bf16", "fp16", "fp32")
CONTRACT: dict[str, tuple[Any, ...]] = {
    "op_and_gate": tuple((op, gate) for op, gates in GATES.items() for gate in gates),
    "tokens": (1, 3, 8, 12),
    "K": (64, 128, 96, 256),
    "V": (64, 128, 32),
    "layout": ("k_last", "v_last"),
    "input_dtype": ("bf16", "fp16"),
    "state_dtype": FLOATS,
    "gate_dtype": FLOATS,
    "beta_dtype": FLOATS,
    "A_log_dtype": FLOATS,
    "dt_bias_dtype": FLOATS,
    "beta": ("logit", "given"),
    "mode": ("update", "frozen"),
    "intermediate": ("none", "dense", "indexed", "slots"),
    "accepted": (False, True),
    "pool": (True, False),
    "ragged": (False, True),
}
# What a kernel of layers has besides, of which one behind a ring has the norm alone.
NORM: dict[str, tuple[Any, ...]] = {
    "norm": ("silu", "sigmoid", "none"),
    "norm_weight_dtype": FLOATS,
}
LAYER: dict[str, tuple[Any, ...]] = {
    **NORM,
    "conv": ("none", "silu", "identity"),
    "conv_width": (4, 3, 2),
    "conv_bias": (False, True),
    "conv_window": ("ring", "shifted", "dims_first"),
    "conv_input": ("packed", "interleaved"),
}
# What a kernel of rings has besides, of contracts and of calls.
RING: dict[str, tuple[Any, ...]] = {
    "ring": (16, 32),
    "ring_dtype": ("fp32", "bf16"),
    "ring_rounding": ("nearest", "stochastic"),
}
RING_CALL: dict[str, tuple[Any, ...]] = {"flush_min": (None, 0, 8), "append": (True, False)}
# make_case's options, plain values first
CALL: dict[str, tuple[Any, ...]] = {
    "group": (1, 2, 3),
    "padding": (0.0, 0.4),
    "skipped": (0.0, 0.3),
    "null_index": (-1, 0),
    "out_of_range": (False, True),
    "split": (False, True),
    "index_dtype": (torch.int32, torch.int64),
    "strided_indices": (False, True),
    "slot_stride_pad": (0, 64),
    "packed_qkv": (False, True),
    "strided_gates": (False, True),
    "more_places": (0, 2),
    "use_qk_l2norm": (True, False),
    "neg_eigval": (False, True),
    "extreme_gates": (False, True),
    "softplus_threshold": (20.0, 0.5),
    "parameters_by_head": ("HV", "H"),
}
_POOLED = ("padding", "skipped", "null_index", "out_of_range", "split")
# Steps of the walk over what a kernel serves, from which rows are chosen.
WALK = 1000
# Rows of a kernel, or as many more as hold every value: seven of ten pairs; 26 to 40 hold all. A row
# takes 7 s of CPU time, most of it the compiler's.
EVERY = os.environ.get("GDNTUNE_TEST_ALL") == "1"
ROWS = int(os.environ.get("GDNTUNE_PTX_ROWS", 99 if EVERY else 6))
VALUE = 24


def requests(contract: Contract) -> int:
    """Of a row; fewer where each is long to interpret, unless their lengths differ."""
    return 2 if contract.tokens > 8 and not contract.ragged else 3


@dataclass(frozen=True)
class Row:
    """A kernel, compiled for a contract with some knobs, and a call of it."""

    kernel: str
    contract: Contract
    variant: Variant
    options: tuple[tuple[str, Any], ...]
    group: int

    @property
    def id(self) -> str:
        """Its name among the tests."""
        return f"{self.variant.id}-{self.contract.key()}"

    @property
    def problem(self) -> Problem:
        H = 2 if self.group == 1 else 1
        return Problem(self.contract, requests(self.contract), H, H * self.group)


def _contract(draw: dict[str, Any]) -> Contract | None:
    """The contract of a draw, or None where there is none such."""
    op, gate = draw["op_and_gate"]
    fields = {name: x for name, x in draw.items() if name in Contract.__struct_fields__}
    contract = Contract(op=op, gate=gate, **fields)
    return None if contract_fault(contract) else contract


def _plain(draw: dict[str, Any]) -> dict[str, Any]:
    """A draw without choices that mean nothing beside its others."""
    draw = dict(draw)
    if not draw["pool"]:
        draw.update({name: CALL[name][0] for name in _POOLED})
    if draw["op_and_gate"][0] == "gdn_decode":
        draw["parameters_by_head"] = "HV"
    if draw.get("norm") == "none":
        draw["norm_weight_dtype"] = "fp32"
    if draw.get("conv") == "none":
        none = ("conv_width", "conv_bias", "conv_window", "conv_input")
        draw.update({name: LAYER[name][0] for name in none})
    if draw["op_and_gate"][0] == "kda_decode" and "conv_input" in draw:
        draw["conv_input"] = "packed"
    if draw.get("conv_input") == "interleaved":
        # of one projection
        draw["beta_dtype"] = draw["gate_dtype"]
    if draw.get("conv_window", "ring") != "ring" and draw["op_and_gate"][0] == "kda_decode":
        # a window that is shifted has one reader
        draw["group"] = 1
    if draw["op_and_gate"][1] == "log":
        draw["A_log_dtype"] = draw["dt_bias_dtype"] = "fp32"
    return draw


def _options(draw: dict[str, Any], contract: Contract) -> dict[str, Any]:
    """make_case's options of a draw."""
    names = (*CALL, *(RING_CALL if contract.ring else ()))
    options = {name: draw[name] for name in names if name not in ("group", "more_places")}
    options |= {"extra_steps": draw["more_places"], "extra_rows": draw["more_places"]}
    if contract.ragged:
        T = contract.tokens
        options |= {"lengths": [(T, 0, max(1, T - 1))[n % 3] for n in range(requests(contract))]}
        options |= {"tail_rows": 2}
    return options


@functools.cache
def _settings(kernel: Kernel) -> tuple[Any, ...]:
    """Knobs that are tried somewhere: those of a few contracts, each once."""
    device = arch.target(ARCH)
    states = (("k_last", "bf16"), ("k_last", "fp32"), ("v_last", "bf16"))
    found: dict[Any, None] = {}
    # a norm needs all of V: its kernels' settings are those of one V
    plain = Contract(norm="silu" if kernel.layer else "none", ring=16 if kernel.ring else 0)
    for V in CONTRACT["V"] if kernel.layer else (plain.V,):
        for op, tokens in product(GATES, (1, 3, 8)):
            for (layout, state), mode in product(states, ("update", "frozen")):
                if layout == "k_last" or mode == "update":
                    base = plain.replace(op=op, tokens=tokens, V=V, gate=GATES[op][0], mode=mode)
                    base = base.replace(layout=layout, state_dtype=state)
                    found.update(dict.fromkeys(kernel.space(base, device)))
        if kernel.layer:
            shifted = plain.replace(V=V, conv="silu", conv_window="shifted")
            found.update(dict.fromkeys(kernel.space(shifted, device)))
        slots = plain.replace(tokens=3, V=V, mode="frozen", intermediate="slots")
        found.update(dict.fromkeys(kernel.space(slots, device)))
    return tuple(found)


def _serving(kernel: Kernel, contract: Contract, first: tuple[Any, ...]) -> Any:
    """Knobs that serve the contract, or None; `first` has those that served others."""
    settings = (*first, *_settings(kernel))
    return next((s for s in settings if kernel.fault(contract, s) is None), None)


def _walk(kernel: Kernel, pick: random.Random) -> list[dict[str, Any]]:
    """Draws that a kernel serves: from one to the next some fields change."""
    behind = NORM if kernel.ring else LAYER
    fields = {**CONTRACT, **(behind if kernel.layer else {}), **CALL}
    if kernel.ring:
        fields |= RING | RING_CALL
    draw: dict[str, Any] | None = None
    served: dict[Contract, Any] = {}
    # What has served one contract mostly serves the next: of 1,297 settings one is tried.
    latest: tuple[Any, ...] = ()
    found = []
    for _ in range(4 * WALK):
        if draw is None:
            new = {name: pick.choice(values) for name, values in fields.items()}
        else:
            new = dict(draw)
            for name in pick.sample(list(fields), pick.choice((2, 6, 12))):
                new[name] = pick.choice(fields[name])
        new = _plain(new)
        contract = _contract(new)
        if contract is None:
            continue
        if contract not in served:
            served[contract] = setting = _serving(kernel, contract, latest)
            if setting is not None and setting not in latest:
                latest = (setting, *latest[:3])
        if served[contract] is not None:
            found.append(draw := new)
            if len(found) == WALK:
                break
    return found


def _bits(draws: list[dict[str, Any]]) -> tuple[list[int], int]:
    """What each draw holds, as a set of bits: values and pairs of them. And the bits of all values."""
    values: dict[Any, int] = {}
    found = []
    for draw in draws:
        numbers = [values.setdefault(item, len(values)) for item in draw.items()]
        found.append(numbers)
    # A value counts as many pairs, so that rare ones come first too. After the values' bits comes a
    # row of bits for each value: those of its pairs.
    many, width = (1 << VALUE) - 1, len(values)
    holds = []
    for numbers in found:
        numbers.sort()
        bits = sum(many << VALUE * n for n in numbers)
        for at, n in enumerate(numbers):
            row = sum(1 << other for other in numbers[at + 1 :])
            bits |= row << VALUE * width + width * n
        holds.append(bits)
    return holds, (1 << VALUE * width) - 1


def chosen(draws: list[dict[str, Any]], enough: int) -> list[dict[str, Any]]:
    """So many of the draws, or more where these lack a value that any of them holds; with `enough`
    beyond all, they hold every pair of two fields' values.
    """
    holds, values = _bits(draws)
    missing = functools.reduce(operator.or_, holds)
    kept: list[dict[str, Any]] = []
    while missing and (len(kept) < enough or missing & values):
        best = max(range(len(draws)), key=lambda n: (holds[n] & missing).bit_count())
        missing &= ~holds[best]
        kept.append(draws[best])
    return kept


def _variant(
    kernel: Kernel, contract: Contract, seen: Counter[Any], pick: random.Random
) -> Variant:
    """A legal variant whose knobs were seen least."""
    legal = [s for s in _settings(kernel) if kernel.refuse(contract, s) is None]
    pick.shuffle(legal)

    def rarity(setting: Any) -> float:
        return sum(1 / (1 + seen[knob]) for knob in vars(setting).items())

    best = max(legal, key=rarity)
    seen.update(vars(best).items())
    return kernel.variant(best)


@functools.cache
def walk(name: str) -> list[dict[str, Any]]:
    """The draws from which a kernel's rows are chosen."""
    return _walk(kernels.get(name), random.Random(f"draws of {name}"))


@functools.cache
def rows(name: str) -> tuple[Row, ...]:
    """A decode kernel's rows: always the same ones."""
    kernel, pick = kernels.get(name), random.Random(f"rows of {name}")
    seen: Counter[Any] = Counter()
    found = []
    for draw in chosen(walk(name), ROWS):
        contract = _contract(draw)
        assert contract is not None
        variant = _variant(kernel, contract, seen, pick)
        options = tuple(_options(draw, contract).items())
        found.append(Row(name, contract, variant, options, draw["group"]))
    return tuple(found)


def decode_kernels() -> list[str]:
    """The CUDA decode kernels of the registry."""
    return [k.name for k in kernels.serving(arch.target(ARCH), "decode")]


@functools.cache
def floor_rows() -> tuple[Row, ...]:
    """The CUDA floor kernels' rows: each form of a floor, with knobs in turn."""
    device = arch.target(ARCH)
    forms = product(FLOATS, CONTRACT["mode"], ("none", "dense"))
    seen: Counter[Any] = Counter()
    pick = random.Random("rows of floors")
    found = []
    for kernel in kernels.serving(device, "floor"):
        for dtype, mode, kept in forms:
            tokens = 1 if kept == "none" else 3
            c = Contract("gdn_decode", tokens, 64, 64, "k_last", "bf16", dtype)
            c = c.replace(mode=mode, intermediate=kept)
            found.append(Row(kernel.name, c, _variant(kernel, c, seen, pick), (), 2))
    return tuple(found)
