"""What a run says beside its table: what failed, and what was asked for and not done."""

from collections.abc import Sequence

from gdntune import kernels
from gdntune.errors import counted, listed
from gdntune.kernels.spec import Role, Variant
from gdntune.results.records import Build, Cell, Check, Record, Trial, latest, timed
from gdntune.tuning.config import same
from gdntune.tuning.plan import Plan, Usable, chosen_by


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each kind of failure, with its count and first reason; what was done again
    counts as it ended last. Peers without times are rows of the report.
    """
    # A peer that does not serve a contract is no failure of this run; its row says why.
    last = [r for r in latest(records) if not (isinstance(r, Trial) and r.role == "peer")]
    lines = []
    for kind, *names in (
        (Build, "did not compile", "did not compile"),
        (Check, "did not pass the check", "did not pass the check"),
        (Trial, "failed while timed", "failed while timed"),
        (Cell, "cell has no times", "cells have no times"),
    ):
        failed = [r for r in last if isinstance(r, kind) and r.status != "ok"]
        if failed:
            what = getattr(failed[0], "variant", "")
            label = what.id if isinstance(what, Variant) else what
            counts = counted(len(failed), *names)
            said = f"{counts}; the first: {label} {failed[0].reason[:300]}"
            lines.append(said.replace("  ", " "))
    return lines


def peers(plan: Plan) -> list[str]:
    """One line for each peer that is not the one its adapter was written for."""
    found = {name: peer.differs() for name, peer in plan.peers.items()}
    return [f"{name}: {'; '.join(differs)}" for name, differs in found.items() if differs]


def untimed(plan: Plan, usable: Usable, records: Sequence[Record]) -> list[str]:
    """What the judged tables choose that is no variant of this config, or has no final samples
    where a cell was timed before.
    """
    if not plan.judged:
        return []
    lines, chosen = [], chosen_by(plan.judged)
    known = {c: {v.id for v in plan.variants(c) if (c, v.id) in usable.sound} for c in plan.tried}
    asked = [(p, name) for p in plan.problems for name in chosen(p)]
    missing = {(p.contract, name) for p, name in asked if name not in known[p.contract]}
    if missing:
        names = listed(sorted({name for _, name in missing}))
        lines.append(
            f"{len(missing)} choices of the judged tables are not timed, since they are no sound"
            f" variants of this config: {names}"
        )
    done = timed(records)
    finals = {
        (r.problem, r.variant.id) for r in records if isinstance(r, Trial) and r.stage == "final"
    }
    late = {(p, name) for p, name in asked if p in done and name in known[p.contract]} - finals
    if late:
        lines.append(
            f"{len(late)} choices of the judged tables have no final samples, since their cells"
            " were timed before they were asked for: judge compares these by the screen's few; a"
            " sweep into another folder times them to the end"
        )
    return lines


def untried(plan: Plan) -> list[str]:
    """The values of the config's `kernels` that no variant has here; they are legal, but not worth
    trying.
    """
    roles: tuple[Role, ...] = ("decode", "floor")
    mine = {k.name for role in roles for k in kernels.serving(plan.device, role)}
    tried: dict[str, bool] = {}
    for part in plan.config.each_part():
        variants = [v for c in part.own_contracts() for v in (*plan.tried[c], *plan.floors[c])]
        for kernel, knob, value in part.values():
            if kernel in mine:
                here = any(v.kernel == kernel and same(v.knobs[knob], value) for v in variants)
                name = f"{kernel}.{knob}={value}"
                tried[name] = here or tried.get(name, False)
    missing = [name for name, found in tried.items() if not found]
    said = f"{len(missing)} values of the config's kernels are tried nowhere: {listed(missing)}"
    return [said] if missing else []
