"""Two tables: where their choices differ, and one table of both."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from gdntune.device.arch import Device
from gdntune.errors import TableError, counted, listed
from gdntune.kernels import dependent_launch as launch
from gdntune.kernels.fingerprint import same_objects
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract
from gdntune.results.records import policy_words
from gdntune.results.table import Origin, Rule, Table, TableVariant, could_serve, ops_of, settings_of


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work units `first` to `last` (None: without end) of a contract where A and B choose
    otherwise; None: no rule there. alone: for calls that do not allow dependent launch.
    """

    contract: str
    first: int
    last: int | None
    a: str | None
    b: str | None
    alone: bool = False


class Differences(msgspec.Struct, frozen=True):
    """choices: where they differ. about: what else the tables differ in, such as device, policy and
    versions.
    """

    choices: tuple[Difference, ...]
    about: tuple[str, ...]


def diff(a: Table, b: Table) -> Differences:
    """In what two tables differ. Variants are equal where kernel and knobs are, whatever they are
    called.
    """
    rules = [{rule.when: rule for rule in t.rules} for t in (a, b)]
    found: list[Difference] = []
    for contract in sorted(rules[0].keys() | rules[1].keys()):
        mine, theirs = (r.get(contract) for r in rules)
        found += _rule_differences(contract.key(), a, mine, b, theirs, dependent_launch=True)
        # Where neither has a choice of its own for them, what such calls take follows from the rest.
        if mine and theirs and (mine.alone or theirs.alone):
            found += _rule_differences(contract.key(), a, mine, b, theirs, dependent_launch=False)
    return Differences(tuple(found), tuple(_about(a, b)))


def _rule_differences(
    key: str,
    a: Table,
    mine: Rule | None,
    b: Table,
    theirs: Rule | None,
    *,
    dependent_launch: bool,
) -> Iterator[Difference]:
    # Both tables' steps: between two of them neither changes its choice.
    starts = sorted(
        {i.first for rule in (mine, theirs) if rule for i in rule.serving(dependent_launch)}
    )
    spans: list[Difference] = []
    for first, after in zip(starts, [*starts[1:], None], strict=True):
        one, other = (
            rule.at(first, dependent_launch).variant if rule else None for rule in (mine, theirs)
        )
        if _what(a, one, dependent_launch) == _what(b, other, dependent_launch):
            continue
        last = None if after is None else after - 1
        before = spans[-1] if spans else None
        # A step of one table alone may leave the pair as it was; such spans are joined.
        if before and before.last == first - 1 and (before.a, before.b) == (one, other):
            spans[-1] = msgspec.structs.replace(before, last=last)
        else:
            spans.append(Difference(key, first, last, one, other, not dependent_launch))
    yield from spans


def _what(t: Table, name: str | None, dependent_launch: bool) -> TableVariant | None:
    """What calls that allow dependent launch, or do not, take of an interval's variant."""
    if name is None or dependent_launch:
        return None if name is None else t.variants[name]
    return TableVariant(t.variants[name].kernel, launch.without(t.variants[name].knobs))


def _about(a: Table, b: Table) -> Iterator[str]:
    if _device(a.device) != _device(b.device):
        yield f"device: {a.device.name} ({a.device.arch}), {b.device.name} ({b.device.arch})"
    yield from _policies(a, b)
    for what in ("software", "kernels"):
        one, two = getattr(a, what), getattr(b, what)
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name):
                yield f"{what} {name}: {one.get(name, 'none')}, {two.get(name, 'none')}"
    if a.evidence != b.evidence:
        yield "journals: " + ", ".join(
            f"{o.config} of {o.started}" for o in (a.evidence, b.evidence)
        )


def _policies(a: Table, b: Table) -> Iterator[str]:
    """The policies of rules for one contract that were not measured alike: a rule's own counts."""
    theirs = {rule.when: b.policy_of(rule) for rule in b.rules}
    pairs = Counter(
        (policy_words(a.policy_of(rule)), policy_words(theirs[rule.when]))
        for rule in a.rules
        if rule.when in theirs and a.policy_of(rule) != theirs[rule.when]
    )
    for (one, two), n in pairs.items():
        yield f"policy of {counted(n, 'contract')}: {one}; {two}"


def _device(device: Device) -> Device:
    """A device without its peak, which differs from run to run where it is measured."""
    return msgspec.structs.replace(device, peak_gb_s=None, peak_source="unknown")


def merge(a: Table, b: Table, prefer: Literal["first", "second"] | None = None) -> Table:
    """One table with the rules of both, sorted by contract.

    The device must be the same, and the code of each kernel that both name, or what it compiles to:
    otherwise their times do not stand side by side. So must the policy, unless no rule of one could
    serve a contract of the other, as those of a layer's step and of the delta rule alone; the
    second's rules then say theirs. A contract whose choices differ is refused, unless `prefer`
    says whose rule counts; where the choices agree, the first's evidence, or the preferred one's,
    is kept. With `prefer` the other's rules for the same contracts are out before all that, and
    with them the code that they alone name. `evidence.sources` holds what each table said of itself. Raises TableError.
    """
    if prefer == "first":
        b = _without(b, {r.when for r in a.rules})
    elif prefer == "second":
        a = _without(a, {r.when for r in b.rules})
    if faults := _faults(a, b):
        raise TableError(
            f"not merged: {'; '.join(faults)}; sweep again, so that both are measured alike"
        )
    conflicts = sorted(
        {d.contract for d in diff(a, b).choices if d.a is not None and d.b is not None}
    )
    if conflicts and prefer is None:
        raise TableError(
            f"not merged: the tables' choices differ for {listed(conflicts)}; say whose rule"
            " counts: --prefer first or --prefer second (`gdntune table diff` shows where)"
        )
    over, under = (b, a) if prefer == "second" else (a, b)
    rules = [r for _, r in sorted((_rules(under, a.policy) | _rules(over, a.policy)).items())]
    named: dict[str, Variant] = {}
    for rule in rules:
        for i in rule.every:
            both = [t.variant(i.variant) for t in (a, b) if i.variant in t.variants]
            named[i.variant] = max(both, key=lambda v: len(v.knobs))
    fingerprints = b.kernels | a.kernels
    for name in a.kernels.keys() & b.kernels.keys():
        fingerprints[name] = _later(name, a, b) or ""
    return Table(
        schema="gdntune.table/1",
        device=a.device,
        software=_joined(a.software, b.software),
        kernels={name: fingerprints[name] for name in sorted({v.kernel for v in named.values()})},
        policy=a.policy,
        evidence=joined_origins((a.evidence, b.evidence), rules),
        variants={name: TableVariant(v.kernel, v.knobs) for name, v in sorted(named.items())},
        rules=tuple(rules),
    )


def _without(t: Table, contracts: set[Contract]) -> Table:
    """A table without its rules for some contracts, and without what these alone name."""
    rules = tuple(r for r in t.rules if r.when not in contracts)
    names = {i.variant for r in rules for i in r.every}
    kernels = {t.variants[name].kernel for name in names}
    return msgspec.structs.replace(
        t,
        rules=rules,
        variants={name: v for name, v in t.variants.items() if name in names},
        kernels={name: f for name, f in t.kernels.items() if name in kernels},
    )


def _rules(t: Table, policy: dict[str, str]) -> dict[Contract, Rule]:
    """A table's rules in one of this policy, by contract."""
    return {
        r.when: msgspec.structs.replace(
            r, policy=msgspec.UNSET if t.policy_of(r) == policy else t.policy_of(r)
        )
        for r in t.rules
    }


def _unlike(a: Table, b: Table) -> tuple[dict[str, str], dict[str, str]] | None:
    """The policies of the first two rules, one of each, that could serve the same contract and were
    not measured alike.
    """
    for mine in a.rules:
        for theirs in b.rules:
            one, two = a.policy_of(mine), b.policy_of(theirs)
            if one != two and could_serve(mine.when, theirs.when):
                return one, two
    return None


def _faults(a: Table, b: Table) -> list[str]:
    """Why the times of two tables do not stand side by side."""
    faults = []
    if _device(a.device) != _device(b.device):
        faults.append(
            f"one is of {a.device.name} ({a.device.arch}), the other of {b.device.name}"
            f" ({b.device.arch})"
        )
    if unlike := _unlike(a, b):
        policies = [policy_words(p) for p in unlike]
        faults.append(f"one was made under {policies[0]}, the other under {policies[1]}")
    faults += [
        f"the code of {name} is not the same ({a.kernels[name]}, {b.kernels[name]})"
        for name in sorted(a.kernels.keys() & b.kernels.keys())
        if _later(name, a, b) is None
    ]
    faults += [
        f"{name} is not the same variant in both"
        for name in sorted(a.variants.keys() & b.variants.keys())
        if not _alike(a.variants[name], b.variants[name])
    ]
    return faults


def _later(kernel: str, a: Table, b: Table) -> str | None:
    """The later of a kernel's fingerprints in two tables, if the objects of the other one are the same, as `same_objects`
    knows it; None where they are not known to be.
    """
    one, other, ops = a.kernels[kernel], b.kernels[kernel], ops_of(a, b)
    if one == other or same_objects(kernel, one, other, ops, settings_of(a, kernel)):
        return other
    return one if same_objects(kernel, other, one, ops, settings_of(b, kernel)) else None


def _alike(one: TableVariant, other: TableVariant) -> bool:
    """Whether two variants of one id are the same: a knob that one version lacks is at its default
    in the other, or the ids would differ.
    """
    shared = one.knobs.keys() & other.knobs.keys()
    return one.kernel == other.kernel and all(one.knobs[k] == other.knobs[k] for k in shared)


def _joined(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    """Versions by name; where two were used, both."""
    both = {
        name: sorted({x for d in (a, b) for x in d.get(name, "").split(", ") if x})
        for name in {**a, **b}
    }
    return {name: ", ".join(versions) for name, versions in both.items()}


def joined_origins(origins: Sequence[Origin], rules: Sequence[Rule]) -> Origin:
    """What a table of several says of itself, with what each said."""
    sources: list[Origin] = []
    for o in origins:
        # Flat: a merged table of merged ones lists the sweeps themselves, each once.
        sources += [s for s in o.sources or (o,) if s not in sources]
    if len(sources) == 1:
        return sources[0]
    losses = [e.regret for rule in rules for i in rule.intervals for e in i.evidence]
    held = [s.held_out_regret_max for s in sources if s.held_out_regret_max is not None]
    kinds = sorted({kind for s in sources for kind in s.failures})
    configs = list(dict.fromkeys(s.config for s in sources))
    return Origin(
        journal_sha256=_sha256(s.journal_sha256 for s in sources),
        config=", ".join(configs),
        config_sha256=_sha256(s.config_sha256 for s in sources),
        started=max(s.started for s in sources),
        cells=len(losses),
        trials=sum(s.trials for s in sources),
        failures={kind: sum(s.failures.get(kind, 0) for s in sources) for kind in kinds},
        regret_max=max(losses, default=0.0),
        regret_mean=round(math.fsum(losses) / len(losses), 6) if losses else 0.0,
        held_out_cells=sum(s.held_out_cells for s in sources),
        held_out_regret_max=max(held, default=None),
        held_out_regret_mean=_held_out_mean(sources),
        sources=tuple(sources),
    )


def _held_out_mean(sources: list[Origin]) -> float | msgspec.UnsetType:
    """Over the held-out cells of all sources that have a mean; unset where none has."""
    means = [(s.held_out_cells, s.held_out_regret_mean) for s in sources]
    known = [(n, mean) for n, mean in means if isinstance(mean, float)]
    cells = sum(n for n, _ in known)
    return round(math.fsum(n * mean for n, mean in known) / cells, 6) if cells else msgspec.UNSET


def _sha256(hashes: Iterator[str]) -> str:
    return hashlib.sha256("".join(f"{h}\n" for h in hashes).encode()).hexdigest()
