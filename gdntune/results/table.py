"""The dispatch table: for each contract, intervals of work units, each with its variant and the
evidence. Read, checked, asked, saved.

A table is data: JSON that is validated whole before any of it is used. It can be wrong, it cannot
    be dangerous.
"""

import bisect
import contextlib
import inspect
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gdntune import strict
from gdntune.device.arch import Device
from gdntune.errors import JournalError, TableError, UnsupportedProblem, listed
from gdntune.files import write_whole
from gdntune.kernels import dependent_launch as launch
from gdntune.kernels.fingerprint import same_objects
from gdntune.kernels.spec import Variant
from gdntune.problem import ITEMSIZE, Contract, contract_fault, without_defaults
from gdntune.sol import Bound

SCHEMA = "gdntune.table/1"
# The runtime computes them in 64 bits.
MAX_WORK_UNITS = 2**63 - 1
WorkUnits = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORK_UNITS)]
Micros = Annotated[float, msgspec.Meta(gt=0)]

# Without these equal a variant's tile and vector sizes mean something else, so a rule says nothing.
_REQUIRED = ("op", "K", "V", "layout", "norm", "conv", "ring")
# What decides time, the first the most; the other fields (dtypes of small tensors, gate and beta)
# are not looked at for an exact match.
_NEARNESS = ("state_dtype", "intermediate", "mode", "tokens", "ragged", "pool", "accepted")
TUNING = _REQUIRED + _NEARNESS
# How a journal begins, or one that xz packed.
_JOURNALS = (b'{"kind":"run"', b"\xfd7zXZ")
_INDIFFERENT = tuple(name for name in Contract.__struct_fields__ if name not in TUNING)


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The interval's variant as measured at one cell inside it. Times are medians but for mean_us,
    on which choices are made.

    regret: mean_us over the best variant's mean, less 1. runner_up: of the other variants timed to
        the end, the fastest.
    floor_us: the best floor kernel, same run. sol: share of the DRAM's peak. status: what bounds
        the cell. fresh: whether these are samples taken after the choice, which had no part in it.
    """

    work_units: WorkUnits
    time_us: Micros
    mean_us: Micros
    q1_us: Micros
    q3_us: Micros
    samples: Annotated[int, msgspec.Meta(ge=1)]
    regret: Annotated[float, msgspec.Meta(ge=0)]
    floor_us: Micros | None = None
    sol: Annotated[float, msgspec.Meta(ge=0)] | None = None
    runner_up: str | None = None
    runner_up_us: Micros | None = None
    status: Bound | None = None
    fresh: bool | msgspec.UnsetType = msgspec.UNSET


class Interval(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}
):
    """From `first` to `last` work units, both included, `variant` is called; `last` None: without
    end.
    """

    first: WorkUnits
    last: WorkUnits | None
    variant: str
    evidence: tuple[Evidence, ...] = ()


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contract's intervals, in order, from 1 to no end.

    policy: how it was measured, where that is not as the table says: in a merged one a layer's step
        may be of a chain of layers.
    alone: what calls that do not allow dependent launch take, where it was chosen for them: as
        `intervals`, without a variant that uses it. Absent where no interval names one that does.
    """

    when: Contract
    intervals: Annotated[tuple[Interval, ...], msgspec.Meta(min_length=1)]
    policy: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    alone: Annotated[tuple[Interval, ...], msgspec.Meta(min_length=1)] | msgspec.UnsetType = (
        msgspec.UNSET
    )

    def serving(self, dependent_launch: bool = True) -> tuple[Interval, ...]:
        """The intervals for calls that allow dependent launch, or do not. Without a choice for the
        latter they are the same, and may name variants that such calls take another form of.
        """
        return self.intervals if dependent_launch or not self.alone else self.alone

    @property
    def every(self) -> tuple[Interval, ...]:
        """The intervals of all calls."""
        return (*self.intervals, *(self.alone or ()))

    def at(self, work_units: int, dependent_launch: bool = True) -> Interval:
        """The interval that work_units >= 1 falls into, see `serving`."""
        found = self.serving(dependent_launch)
        return found[bisect.bisect_right(found, work_units, key=lambda i: i.first) - 1]


class TableVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variant; its id is its key in `Table.variants`."""

    kernel: str
    knobs: dict[str, int | str | bool]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a table comes from. failures: by kind of record. regret_max, regret_mean: over the
    measured cells, shares.

    held_out_*: at cells that were timed but had no part in the choice; `held_out_cells` of 0: none
        were. held_out_regret_mean: absent where there is none, or an older version wrote.
    sources: of a merged table, what each was; its own trials and failures are their sums, its cells
        and regrets those of the rules that it has, its journal_sha256 the SHA-256 of theirs, a line
        each.
    """

    journal_sha256: str
    config: str
    config_sha256: str
    started: str
    cells: int
    trials: int
    failures: dict[str, int]
    regret_max: float
    regret_mean: float
    held_out_cells: int = 0
    held_out_regret_max: float | None = None
    held_out_regret_mean: float | msgspec.UnsetType = msgspec.UNSET
    # Left out of the JSON where it is unset, so that a sweep's table stays what it was before there
    # were merged ones.
    sources: tuple["Origin", ...] | msgspec.UnsetType = msgspec.UNSET


def noise_words(origin: Origin) -> str:
    """What a reader of a table must know of its noisy cells; empty where it has none."""
    count = origin.failures.get("noisy", 0)
    if not count:
        return ""
    return (
        f"{count} of its {origin.cells + origin.held_out_cells} cells have times that cannot be"
        " believed (the journal has the reasons); give the same sweep again on a machine that does"
        " nothing else, which times these cells again"
    )


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dispatch table. Made by `load`, `validate` or `derive.derive`.

    software, policy: as in the journal's header; a rule may have a policy of its own. kernels: the fingerprint of each kernel that a
        variant names.
    """

    schema: Literal["gdntune.table/1"]
    device: Device
    software: dict[str, str]
    kernels: dict[str, str]
    policy: dict[str, str]
    evidence: Origin
    variants: dict[str, TableVariant]
    rules: Annotated[tuple[Rule, ...], msgspec.Meta(min_length=1)]

    def policy_of(self, rule: Rule) -> dict[str, str]:
        """How a rule was measured."""
        return self.policy if isinstance(rule.policy, msgspec.UnsetType) else rule.policy

    def variant(self, name: str) -> Variant:
        """The variant that an interval names."""
        found = self.variants[name]
        return Variant(found.kernel, name, dict(found.knobs))

    def ranked(self, contract: Contract) -> list[Rule]:
        """The rules that could serve a contract, the nearest first.

        Op, K, V, layout and the state's item size must agree, and of a layer's step whether it
        is of one token. Then the order is: state_dtype, intermediate (the same, then whether there
        are any), mode, the ratio of tokens, ragged, pool, accepted; then how many of the fields that
        hardly matter differ; then the table's order.
        """
        served = [r for r in self.rules if could_serve(r.when, contract)]
        return sorted(served, key=lambda r: _distance(r.when, contract))

    def find(
        self, contract: Contract, work_units: int, *, dependent_launch: bool = True
    ) -> tuple[Rule, Interval] | None:
        """The nearest rule and its interval, see `Rule.serving`; None where no rule is near.
        UnsupportedProblem for work units below 1.
        """
        check_work_units(work_units)
        ranked = self.ranked(contract)
        return (ranked[0], ranked[0].at(work_units, dependent_launch)) if ranked else None

    def explain(
        self, contract: Contract, work_units: int, *, dependent_launch: bool = True
    ) -> dict[str, Any]:
        """What the table names at (contract, work units), and why, as plain values; see
        `Rule.serving`.
        """
        found = self.find(contract, work_units, dependent_launch=dependent_launch)
        asked = {
            "contract": contract.key(),
            "work_units": work_units,
            "device": self.device.name,
            "policy": self.policy,
        }
        if found is None:
            near = ", ".join(f"{name}={getattr(contract, name)}" for name in _REQUIRED)
            reason = (
                f"no rule for {near} and a {ITEMSIZE[contract.state_dtype]}-byte state: the"
                " kernel's default is used"
            )
            return {**asked, "match": "none", "variant": None, "reason": reason}
        rule, interval = found
        differs = {
            name: {"asked": getattr(contract, name), "rule": getattr(rule.when, name)}
            for name in TUNING
            if getattr(contract, name) != getattr(rule.when, name)
        }
        chosen = self.variants[interval.variant]
        seen = min(
            interval.evidence, key=lambda e: abs(math.log(e.work_units / work_units)), default=None
        )
        slight = [n for n in _INDIFFERENT if getattr(contract, n) != getattr(rule.when, n)]
        if differs:
            reason = f"the nearest rule, which differs in {listed(differs)}"
        elif slight:
            reason = f"the rule of this contract with other {listed(slight)}, which hardly matters"
        else:
            reason = "the contract's own rule"
        if not dependent_launch and rule.alone:
            reason += ", its choice for calls without dependent launch"
        return {
            **asked,
            "policy": self.policy_of(rule),
            "match": "nearest" if differs else "exact",
            "differs": differs,
            "rule": rule.when.key(),
            "interval": [interval.first, interval.last],
            "variant": interval.variant,
            "kernel": chosen.kernel,
            "knobs": dict(chosen.knobs),
            "evidence": msgspec.to_builtins(seen),
            "runner_up": seen and seen.runner_up,
            "reason": reason + _seen(seen, work_units),
        }


def _seen(evidence: Evidence | None, work_units: int) -> str:
    """What was measured nearest to some work units, as the end of a reason."""
    if evidence is None:
        return "; nothing was measured in this interval"
    at = (
        f"at {work_units} work units"
        if evidence.work_units == work_units
        else f"at the nearest measured cell ({evidence.work_units} work units)"
    )
    # A regret is of means, which decide; the runner-up has a median alone.
    words = (
        f"; {at} its median is {evidence.time_us:.4g} us, and its mean {evidence.mean_us:.4g} us,"
        f" {evidence.regret:.1%} over the best mean"
    )
    if evidence.runner_up is not None and evidence.runner_up_us is not None:
        words += f"; the next best, {evidence.runner_up}, has a median of {evidence.runner_up_us:.4g} us"
    return words


class Head(msgspec.Struct, frozen=True):
    """Of a table, what it is of."""

    device: Device


def device_of(path: str | os.PathLike[str]) -> Device:
    """The device that a table was measured on, in a tenth of the time that `load` takes, which
    checks the rest too. TableError where it is no table.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Head).device
    except (OSError, msgspec.DecodeError):
        return load(path).device


def load(path: str | os.PathLike[str]) -> Table:
    """The table in a file; TableError where it cannot be read or trusted."""
    if os.path.isdir(path):
        raise TableError(
            f"{path} is a folder, a table is wanted: give the file, {Path(path) / 'table.json'} if"
            " a sweep wrote it"
        )
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise TableError(
            f"{path}: {getattr(e, 'strerror', None) or e}; expected a JSON file that `gdntune"
            " sweep` wrote"
        ) from e
    # The two files lie side by side in a sweep's folder and are mixed up easily.
    if data.startswith(_JOURNALS):
        raise TableError(
            f"{path} is a journal, a table is wanted: `gdntune replay {path} -o table.json` makes"
            " its own"
        )
    return validate(data, str(path))


def refuse_tables(paths: Iterable[Path]) -> None:
    """JournalError for a table where a journal is wanted: it says which file to give. What else a
    file may be, its reader says.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if not re.match(rb'\s*{\s*"schema"\s*:\s*"gdntune\.table/', file.read(200)):
                continue
            beside = path.with_name("journal.jsonl")
            give = (
                f"give {beside}"
                if beside.exists()
                else f"give that of its sweep; `gdntune table show {path}` says which that was"
            )
            raise JournalError(f"{path} is a table, a journal is wanted: {give}")


def validate(data: bytes, source: str = "<table>") -> Table:
    """The table in JSON; TableError names source, JSON path, value and what is expected."""
    strict.refuse_newer(data, SCHEMA, source, TableError)
    strict.refuse_odd_json(data, source, TableError)
    try:
        table: Table = strict.decode(
            data, Table, source, TableError, "a JSON file that `gdntune sweep` wrote"
        )
    except TableError as e:
        newer = strict.newer_writer(data)
        raise TableError(f"{e}{newer and f'; {newer}'}") from None
    for path, fault in _faults(table):
        raise TableError(f"{source}: {path} {fault}")
    return table


def save(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes a table whole or not at all, equal tables byte for byte equally; TableError where it
    is not valid or cannot be written.
    """
    data = _text(table)
    validate(data, str(path))
    try:
        write_whole(path, data)
    except OSError as e:
        raise TableError(
            f"{path}: not written: {e.strerror or e}; what was there is unchanged"
        ) from e


def _text(table: Table) -> bytes:
    """JSON with a line an interval and a variant, so that a diff of two tables shows choices."""
    whole = msgspec.to_builtins(table)
    variants, rules = whole.pop("variants"), whole.pop("rules")
    head = msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()
    lines = [f"  {_line(name)}: {_line(variant)}" for name, variant in variants.items()]
    shown = []
    for rule in rules:
        own = f' "policy": {_line(rule["policy"])},' if "policy" in rule else ""
        lists = [
            f'   "{name}": [\n' + ",\n".join(f"    {_line(i)}" for i in rule[name]) + "]"
            for name in ("intervals", "alone")
            if name in rule
        ]
        between_lists = ",\n".join(lists)
        shown.append(f'  {{"when": {_line(rule["when"])},{own}\n{between_lists}}}')
    between = ",\n"
    return (
        f'{head.removesuffix("}").rstrip()},\n "variants": {{\n{between.join(lines)}\n }},\n'
        f' "rules": [\n{between.join(shown)}\n ]\n}}\n'
    ).encode()


def _line(value: Any) -> str:
    return msgspec.json.format(without_defaults(msgspec.json.encode(value)), indent=0).decode()


def stale(table: Table, fingerprints: Mapping[str, str]) -> list[str]:
    """The table's kernels whose installed code is not what was measured, nor compiles to the same
    objects, or is not installed, given fingerprints by name.
    """
    ops = ops_of(table)
    return sorted(
        name
        for name, was in table.kernels.items()
        if (code := fingerprints.get(name)) != was
        and not same_objects(name, was, code, ops, settings_of(table, name))
    )


def settings_of(table: Table, kernel: str) -> list[Mapping[str, Any]]:
    """The knobs of each variant of a kernel that a table names."""
    return [v.knobs for v in table.variants.values() if v.kernel == kernel]


def ops_of(*tables: Table) -> frozenset[str]:
    """The ops that tables have rules for."""
    return frozenset(rule.when.op for table in tables for rule in table.rules)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a table, published as docs/table.schema.json. `validate` checks
    more than a schema can say.
    """
    schema = _dedented(msgspec.json.schema(Table))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:gdntune:table:1",
        "title": "gdntune dispatch table, version 1",
        **schema,
    }


def _dedented(schema: Any) -> Any:
    """Descriptions are docstrings, which some versions of Python and msgspec leave indented."""
    if isinstance(schema, dict):
        return {
            key: inspect.cleandoc(x)
            if key == "description" and isinstance(x, str)
            else _dedented(x)
            for key, x in schema.items()
        }
    return [_dedented(x) for x in schema] if isinstance(schema, list) else schema


def check_work_units(work_units: int) -> None:
    """UnsupportedProblem for work units that no call has."""
    if not 1 <= work_units <= MAX_WORK_UNITS:
        raise UnsupportedProblem(
            f"work units (B*HV) are {work_units}: expected an integer from 1 to {MAX_WORK_UNITS}"
        )


def could_serve(when: Contract, contract: Contract) -> bool:
    """Whether a rule may be the nearest one of a contract."""
    same = all(getattr(when, name) == getattr(contract, name) for name in _REQUIRED)
    if contract.layer and (when.tokens == 1) != (contract.tokens == 1):
        # Of a layer's step these are two kernels: what one token's rule chose took up to 1.05 of what
        # the default rule does at four (fp32, H200), which then lost to the parts apart.
        return False
    return same and ITEMSIZE[when.state_dtype] == ITEMSIZE[contract.state_dtype]


def _distance(when: Contract, contract: Contract) -> tuple[float, ...]:
    def apart(name: str) -> float:
        a, b = getattr(when, name), getattr(contract, name)
        # Tokens by ratio: from 1 to 2 changes a kernel more than from 7 to 8.
        if name == "tokens":
            return abs(math.log2(a / b))
        # A state a token is most of a call's bytes, wherever it goes.
        if name == "intermediate" and a != b:
            return 1.0 if "none" in (a, b) else 0.5
        return float(a != b)

    return (*(apart(name) for name in _NEARNESS), sum(apart(name) for name in _INDIFFERENT))


def _faults(table: Table) -> Iterator[tuple[str, str]]:
    """What types do not show: the path, and what is wrong there."""
    for name, variant in table.variants.items():
        if variant.kernel not in table.kernels:
            yield (
                f"$.variants[{name!r}].kernel",
                (
                    f"is {variant.kernel!r}: expected one of the keys of $.kernels:"
                    f" {listed(table.kernels)}"
                ),
            )
    seen: dict[Contract, int] = {}
    for i, rule in enumerate(table.rules):
        if fault := contract_fault(rule.when):
            yield f"$.rules[{i}].when", f"is no legal contract: {fault}"
        # Of two rules for one contract the first would serve and the second be dead.
        if rule.when in seen:
            yield (
                f"$.rules[{i}].when",
                f"is that of $.rules[{seen[rule.when]}] again: leave one rule for a contract",
            )
        seen[rule.when] = i
        for name, found in (("intervals", rule.intervals), ("alone", rule.alone or ())):
            for j, interval in enumerate(found):
                previous = found[j - 1] if j else None
                for path, fault in _interval_faults(
                    table, interval, previous, j == len(found) - 1
                ):
                    yield f"$.rules[{i}].{name}[{j}]{path}", fault
        for j, interval in enumerate(rule.alone or ()):
            if launch.uses(table.variants[interval.variant].knobs):
                yield (
                    f"$.rules[{i}].alone[{j}].variant",
                    f"is {interval.variant!r}, which uses dependent launch: expected one that does"
                    " not, calls that do not allow it take it",
                )


def _interval_faults(
    table: Table, interval: Interval, previous: Interval | None, is_last: bool
) -> Iterator[tuple[str, str]]:
    first, last = interval.first, interval.last
    if previous is None and first != 1:
        yield ".from", f"is {first}: the first interval starts at 1"
    if previous is not None and previous.last is not None and first != previous.last + 1:
        kind = "overlaps the interval before it" if first <= previous.last else "leaves a gap"
        yield (
            ".from",
            (f"is {first} and {kind}, which ends at {previous.last}: expected {previous.last + 1}"),
        )
    if is_last and last is not None:
        yield ".to", f"is {last}: the last interval has no end, expected null"
    if not is_last and last is None:
        yield ".to", "is null: only the last interval has no end"
    if last is not None and last < first:
        yield ".to", f"is {last}: expected an integer from {first}, where the interval starts"
    if interval.variant not in table.variants:
        near = strict.near(interval.variant, table.variants)
        yield (
            ".variant",
            (
                f"is {interval.variant!r}{near}: expected one of the keys of $.variants:"
                f" {listed(table.variants)}"
            ),
        )
    before = 0
    for k, e in enumerate(interval.evidence):
        if e.work_units <= before:
            yield (
                f".evidence[{k}].work_units",
                f"is {e.work_units}, after {before}: expected rising numbers",
            )
        if e.work_units < first or (last is not None and e.work_units > last):
            yield (
                f".evidence[{k}].work_units",
                (
                    f"is {e.work_units}: expected a number within the interval, {first} to"
                    f" {last or 'no end'}"
                ),
            )
        if not e.q1_us <= e.time_us <= e.q3_us:
            yield (
                f".evidence[{k}].time_us",
                f"is {e.time_us}: a median lies between q1_us={e.q1_us} and q3_us={e.q3_us}",
            )
        before = e.work_units
