"""A dispatch table as a document, for people to look through."""

from collections.abc import Mapping, Sequence

import msgspec

from gdntune.errors import counted
from gdntune.report.document import Block, Bullets, Document, Grid, Section, Text
from gdntune.report.reading import knobs_of
from gdntune.report.words import MISSING, contract_words, number, ratio
from gdntune.results.records import policy_words
from gdntune.results.table import Interval, Origin, Rule, Table, noise_words

WITHOUT_LAUNCH = "Calls without dependent launch"
_APART = (
    f"{WITHOUT_LAUNCH}, which is the default, take the intervals under that heading; calls with"
    " dependent_launch=True take those above it. Where a rule has no such heading, both take its"
    " intervals, each in its own form."
)


def _mean_words(origin: Origin) -> str:
    mean = origin.held_out_regret_mean
    return f", {mean:.2%} on average," if isinstance(mean, float) else ""


def table_document(table: Table, source: str, stale: Sequence[str] = ()) -> Document:
    """A table's origin, then each rule: its intervals, and what was measured in them. stale:
    kernels whose code is another now.
    """
    device, origin = table.device, table.evidence
    facts = [
        f"Device: {device.name} ({device.arch}).",
        f"Policy: {policy_words(table.policy)}{_others(table)}.",
        (
            f"From {origin.config}, {origin.started}: {counted(origin.cells, 'cell')},"
            f" {counted(origin.trials, 'trial')},"
            f" {sum(n for kind, n in origin.failures.items() if kind != 'noisy')} failures;"
            f" journal sha256 {origin.journal_sha256[:16]}."
        ),
        f"Regret at the measured cells: {origin.regret_max:.2%} at most, {origin.regret_mean:.2%}"
        " on average"
        + (
            f"; {origin.held_out_regret_max:.2%} at most{_mean_words(origin)} at"
            f" {origin.held_out_cells} held-out cells."
            if origin.held_out_regret_max is not None
            else "."
        ),
        f"Software: {', '.join(f'{k} {v}' for k, v in sorted(table.software.items()))}.",
    ]
    if noise := noise_words(origin):
        facts.append(f"NOISY: {noise}.")
    if stale:
        facts.append(
            f"STALE: {', '.join(stale)} is installed with other code than was measured; sweep"
            " again."
        )
    rules, variants = counted(len(table.rules), "rule"), counted(len(table.variants), "variant")
    sections = [
        Section(
            "Summary",
            (
                Text(f"{rules}, {variants}."),
                Bullets(tuple(facts)),
            ),
        )
    ]
    sections += [Section(_title(rule), _rule(rule)) for rule in table.rules]
    sections.append(
        Section(
            "How to read the rules",
            (
                Bullets(
                    (
                        "Work units are B x HV, a batch times its value heads; a call takes the"
                        " variant of the interval that its work units are in.",
                        "Measured at: the work units of a cell in the interval. us: the variant's"
                        " median there.",
                        "x floor: that time over the floor's, a kernel that only moves the same"
                        " state bytes. SOL %: bytes that must move over the time, as a share of the"
                        " DRAM's peak bandwidth.",
                        "Regret %: how much longer the variant's mean is than the best mean"
                        " measured there.",
                        *([_APART] if any(rule.alone for rule in table.rules) else []),
                    )
                ),
            ),
        )
    )
    ids = tuple(knobs_of(table.variant(name) for name in table.variants))
    if ids:
        sections.append(Section("What variants' ids say", ids))
    return Document(source, tuple(sections))


def _others(table: Table) -> str:
    """That rules have other policies than the table's, where some do."""
    others = sum(table.policy_of(rule) != table.policy for rule in table.rules)
    if not others:
        return ""
    return (
        f"; {others} of {counted(len(table.rules), 'rule')} by another, which their heading names"
    )


def _title(rule: Rule) -> str:
    words = f"T={rule.when.tokens}: {contract_words(rule.when.replace(tokens=1))}"
    if isinstance(rule.policy, msgspec.UnsetType):
        return words
    return f"{words}; measured under {policy_words(rule.policy)}"


def _rule(rule: Rule) -> tuple[Block, ...]:
    others = [_intervals(WITHOUT_LAUNCH, rule.alone)] if rule.alone else []
    return (_intervals("", rule.intervals), *others)


def _intervals(caption: str, found: Sequence[Interval]) -> Grid:
    rows: list[tuple[str, ...]] = []
    shades: list[tuple[float | None, ...]] = []
    for interval in found:
        span = _span(interval)
        if not interval.evidence:
            # An interval may have no cell of its own, in a merged table or beyond the last one.
            rows.append((span, interval.variant, *(MISSING,) * 5))
            shades.append((None,) * 7)
        for e in interval.evidence:
            floor = MISSING if e.floor_us is None else ratio(e.time_us / e.floor_us)
            share = MISSING if e.sol is None else f"{100 * e.sol:.1f}"
            rows.append(
                (
                    span,
                    interval.variant,
                    str(e.work_units),
                    number(e.time_us),
                    floor,
                    share,
                    f"{100 * e.regret:.1f}",
                )
            )
            shades.append((None, None, None, *(e.sol,) * 3, None))
            # Said once an interval.
            span = ""
    headers = ("work units", "variant", "measured at", "us", "x floor", "SOL %", "regret %")
    return Grid(caption, headers, tuple(rows), tuple(shades), left=2)


def launch_gains(table: Table) -> list[tuple[Rule, int, float]]:
    """At each cell of a rule with a choice for calls without dependent launch, what that takes over
    what calls that allow it take: the rule, the work units and the ratio of means.
    """
    found = []
    for rule in table.rules:
        means = [
            {e.work_units: e.mean_us for i in of for e in i.evidence}
            for of in (rule.intervals, rule.alone or ())
        ]
        found += [(rule, n, us / means[0][n]) for n, us in means[1].items() if n in means[0]]
    return found


def without_launch(table: Table, title: str, letters: Mapping[str, str]) -> Section:
    """A table for each rule that has a choice for calls without dependent launch; nothing where
    none has. letters: short names of variants, as the report's other tables have them.
    """
    gains = {(rule.when, n): gain for rule, n, gain in launch_gains(table)}
    blocks: list[Block] = []
    for rule in table.rules:
        rows = tuple(
            (
                f"{i.first}" if n == 0 else "",
                letters[i.variant] if n == 0 else "",
                str(e.work_units),
                number(e.time_us),
                f"{100 * e.regret:.1f}",
                ratio(gains[rule.when, e.work_units])
                if (rule.when, e.work_units) in gains
                else MISSING,
            )
            for i in rule.alone or ()
            for n, e in enumerate(i.evidence)
        )
        if rows:
            headers = ("from", "variant", "measured at", "us", "regret %", "over with")
            blocks.append(Grid(_title(rule), headers, rows, left=2))
            named = dict.fromkeys(i.variant for i in rule.alone or ())
            blocks.append(Bullets(tuple(f"{letters[name]}: `{name}`" for name in named)))
    if blocks:
        blocks.insert(
            0,
            Text(
                "What calls take that do not allow dependent launch, from so many work units on."
                " Regret: over the best variant without it. Over with: the mean over that of what"
                " calls that allow it take."
            ),
        )
    return Section(title, tuple(blocks), detail=True)


def _span(interval: Interval) -> str:
    return (
        f"{interval.first} on" if interval.last is None else f"{interval.first} to {interval.last}"
    )
