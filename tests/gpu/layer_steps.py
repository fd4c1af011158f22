"""What several calls of a layer's step must agree on: T of one token with one of T, and drafts that were
rejected with none at all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from gdntune.checking.cases import Case, make_case
from gdntune.problem import Contract, Problem

STEP = {"norm": "silu", "conv": "silu", "state_dtype": "fp32"}
TOKENS = Contract(**STEP, tokens=4)
DRAFTS = Contract(**STEP, tokens=4, mode="frozen", intermediate="slots", accepted=True)
SHIFTED = {"conv_window": "shifted"}
# Of a layer's output, whose elements are about one: bf16's rounding of it, twice.
ROUNDING = 2.0**-7

Function = Callable[..., Any]


def contracts() -> list[Contract]:
    """Those whose kernels are called."""
    found = [TOKENS, TOKENS.replace(tokens=1), DRAFTS]
    return [*found, *(c.replace(**SHIFTED) for c in found)]


def _tokens(case: Case, first: int, count: int, contract: Contract) -> Case:
    """A call of some of a case's tokens, on the same states and windows."""
    part = slice(first, first + count)
    names = ("mixed_qkv", "a", "b", "output", "output_gate")
    inputs = {name: getattr(case, name)[:, part] for name in names}
    at = case.conv_position
    if at is not None:
        at = ((at + first) % case.conv_state.shape[1]).to(torch.int32)
    problem = Problem(contract, case.problem.B, case.problem.H, case.problem.HV)
    one = dataclasses.replace(case, problem=problem, conv_position=at)
    return one.with_inputs(**inputs)


def tokens_agree(function_of: Callable[[Contract], Function], place: str, window: dict) -> float:
    """By how much T calls of one token and one of T differ: of outputs and states."""
    several = TOKENS.replace(**window)
    single = several.replace(tokens=1)
    whole = make_case(Problem(several, 5, 2, 4), place, 3)
    apart = whole.clone()
    function_of(several)(*whole.arguments())
    for t in range(several.tokens):
        one = _tokens(apart, t, 1, single)
        # kernels take contiguous rows of outputs
        one = one.with_inputs(output=one.output.contiguous())
        function_of(single)(*one.arguments())
        apart.output[:, t : t + 1] = one.output
    pairs = ((whole.output, apart.output), (whole.state, apart.state))
    return max(float((a.double() - b.double()).abs().nan_to_num().max()) for a, b in pairs)


def rejected_drafts_leave_nothing(
    function_of: Callable[[Contract], Function], place: str, window: dict
) -> bool:
    """Whether what follows drafts of which the first alone was accepted is the same, bit for bit,
    whatever the others were.
    """
    c = DRAFTS.replace(**window)
    first = make_case(Problem(c, 5, 2, 4), place, 4)
    # other rows than those of the draw's own counts
    first.accepted.fill_(1)
    first.conv_state.nan_to_num_(0.5)
    results = []
    for rejected in (0.0, 7.0):
        case = first.clone()
        case.mixed_qkv[:, 1:] += rejected
        function_of(c)(*case.arguments())
        at = case.conv_position
        if at is not None:
            at = ((at + 1) % case.conv_state.shape[1]).to(torch.int32)
        after = dataclasses.replace(case, conv_position=at)
        after.mixed_qkv.copy_(first.mixed_qkv.flip(0))
        function_of(c)(*after.arguments())
        results.append(after.output.clone())
    return torch.equal(*results)


def agree(function_of: Callable[[Contract], Function], place: str) -> bool:
    """Prints what differs; whether nothing does beyond rounding."""
    right = True
    for window in ({}, SHIFTED):
        name = window.get("conv_window", "ring")
        off = tokens_agree(function_of, place, window)
        same = rejected_drafts_leave_nothing(function_of, place, window)
        print(
            f"{name}: 4 calls of one token differ from one of 4 by {off:.2g}, expected at most"
            f" {ROUNDING:.2g}; rejected drafts leave {'nothing' if same else 'something'}",
            flush=True,
        )
        right &= off <= ROUNDING and same
    return right
