"""Rings of corrections in what is timed: the steps of a cycle, since a call that folds its ring
into the state takes longer than one that does not.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

from gdntune.checking.cases import Case
from gdntune.problem import Contract


def windows(c: Contract) -> list[int]:
    """The live entries at each step of a cycle in which all drafts are accepted, the step that
    folds them first.
    """
    steps = list(range(c.tokens, c.ring + 1, c.tokens))
    return [steps[-1], *steps[:-1]]


def steps(case: Case) -> list[Case]:
    """The case at each step of a cycle: other counts of live entries, everything else shared.
    Requests are staggered, each elsewhere in the cycle.
    """
    found, B = windows(case.contract), case.problem.B
    order = random.Random(0).sample(range(B), B)

    def counts(step: int) -> torch.Tensor:
        values = [found[(n + step) % len(found)] for n in order]
        return torch.tensor(values, dtype=torch.int32, device=case.q.device)

    filled(case)
    return [dataclasses.replace(case, ring_count=counts(step)) for step in range(len(found))]


def spread(cases: Sequence[Case]) -> list[Case]:
    """The cases of several layers, each at a step of its own, evenly over the cycle."""
    n, layers = len(windows(cases[0].contract)), len(cases)
    return [steps(case)[layer * n // layers] for layer, case in enumerate(cases)]


def filled(case: Case) -> None:
    """Numbers, as live entries have them, in the rows of the rings that have none: which are live,
    each step says.
    """
    k, u, decay = case.ring_k, case.ring_u, case.ring_decay
    assert k is not None and u is not None and decay is not None
    chance = torch.Generator(u.device).manual_seed(0)
    size = case.contract.K**-0.5
    for x, scale in ((k, 1.0 if case.use_qk_l2norm else size), (u, size)):
        drawn = torch.empty_like(x).normal_(generator=chance).mul_(scale)
        x.copy_(torch.where(x.isnan(), drawn, x))
    drawn = torch.empty_like(decay).uniform_(0.5, 1.0, generator=chance)
    decay.copy_(torch.where(decay.isnan(), drawn, decay))


def in_turns(calls: Sequence[Callable[[], Any]]) -> Callable[[int], Any]:
    """One call after another, from the first again behind the last."""
    turns = cycle(calls)
    return lambda _: next(turns)()
