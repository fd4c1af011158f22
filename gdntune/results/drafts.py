"""What verifying drafts is expected to cost, of what a table measured: a state per token, outputs
alone and a commit, or a ring of corrections.
"""

import bisect

import msgspec

from gdntune.errors import UnsupportedProblem
from gdntune.problem import RINGS, Contract
from gdntune.results.table import Table


class Estimate(msgspec.Struct, frozen=True):
    """Microseconds of a call. contract: of the rule that was measured; how: from which cells;
    policy: how that rule was measured, so that two of other policies are not compared unawares.
    """

    time_us: float
    contract: str
    how: str
    policy: dict[str, str]


class Way(msgspec.Struct, frozen=True):
    """A way to verify: microseconds a layer and step, and an accepted token; calls: what it is made
    of.
    """

    name: str
    step_us: float
    accepted_us: float
    calls: list[Estimate]


def estimate(table: Table, contract: Contract, work_units: int) -> Estimate | None:
    """The time of the table's choice at some work units, between the cells that were measured in
    proportion, beyond the last one by its rate; None where no rule has measured cells.

    Below the first cell it is that cell's: a launch has fixed costs.
    """
    found = table.find(contract, work_units)
    if found is None:
        return None
    rule, _ = found
    # the nearest rule may write other states than the contract
    if _written(rule.when) != _written(contract):
        return None
    # what the calls take unless they ask for more
    served = rule.serving(dependent_launch=False)
    cells = {e.work_units: e.time_us for i in served for e in i.evidence}
    if not cells:
        return None
    at = sorted(cells)
    n = bisect.bisect_left(at, work_units)
    if n < len(at) and at[n] == work_units:
        time_us, how = cells[work_units], f"measured at {work_units}"
    elif n == 0:
        time_us, how = cells[at[0]], f"as at {at[0]}, the fewest measured"
    elif n == len(at):
        time_us = cells[at[-1]] * work_units / at[-1]
        how = f"by the rate at {at[-1]}, the most measured"
    else:
        low, high = at[n - 1], at[n]
        share = (work_units - low) / (high - low)
        time_us = cells[low] + share * (cells[high] - cells[low])
        how = f"between {low} and {high}"
    return Estimate(time_us, rule.when.key(), how, table.policy_of(rule))


def _written(contract: Contract) -> tuple[str, bool]:
    """The final state, and whether there is one of each token."""
    return contract.mode, contract.intermediate != "none"


def _timed(table: Table, contract: Contract) -> bool:
    """Whether a table has a ring's rule of as many tokens and of these states: another's says little,
    as how often a ring is folded hangs on T.
    """
    return any(
        (r.when.ring, r.when.tokens, r.when.state_dtype)
        == (contract.ring, contract.tokens, contract.state_dtype)
        for r in table.ranked(contract)
    )


def missing(op: str, found: list[Way]) -> list[tuple[str, str]]:
    """The ways that a table says nothing of, and the config of a sweep that measures each."""
    gdn = op == "gdn_decode"
    configs = {
        "a state per token": "configs/shipped.yaml",
        "raw window": "configs/shipped.yaml" if gdn else "configs/ring-kda.yaml",
        "a ring": "configs/ring.yaml" if gdn else "configs/ring-kda.yaml",
    }
    return [
        (name, config)
        for name, config in configs.items()
        if not any(w.name.startswith(name) for w in found)
    ]


def ways(
    table: Table, contract: Contract, work_units: int, accept_rate: float, layers: int
) -> list[Way]:
    """Each way's expected cost, the cheapest an accepted token first.

    contract: op, tokens, dtypes and gate of the decode calls; work_units: B*HV of a layer. Of T
    tokens the first is known and always kept, and each draft after it with probability accept_rate
    if the one before was: a step keeps (1 - p^T) / (1 - p).
    """
    if not 0 <= accept_rate <= 1:
        raise UnsupportedProblem(f"accept_rate={accept_rate}: expected 0 to 1")
    if contract.tokens < 2:
        raise UnsupportedProblem(f"tokens={contract.tokens}: expected 2 or more, drafts to verify")
    if layers < 1:
        raise UnsupportedProblem(f"layers={layers}: expected 1 or more")
    kept = sum(accept_rate**t for t in range(contract.tokens))
    frozen = contract.replace(mode="frozen")
    alone = estimate(table, frozen, work_units)
    # one launch for all layers, whose heads are side by side
    commit = estimate(table, contract.replace(mode="update", ragged=True), work_units * layers)
    each = estimate(table, frozen.replace(intermediate="slots", accepted=True), work_units)
    found = []
    if each is not None:
        found.append(("a state per token", [each]))
    if alone is not None and commit is not None:
        share = msgspec.structs.replace(
            commit,
            time_us=commit.time_us / layers,
            how=f"{commit.how}; 1 of {layers} layers of a commit",
        )
        found.append(("raw window", [alone, share]))
    for ring in RINGS:
        wanted = contract.replace(mode="update", ring=ring)
        kept_apart = estimate(table, wanted, work_units) if _timed(table, wanted) else None
        if kept_apart is not None:
            how = f"{kept_apart.how}; the mean over a cycle of steps that accept all, folds included"
            found.append((f"a ring of {ring}", [msgspec.structs.replace(kept_apart, how=how)]))
    made = []
    for name, calls in found:
        step_us = sum(c.time_us for c in calls)
        made.append(Way(name, step_us, step_us / kept, calls))
    return sorted(made, key=lambda w: w.accepted_us)
