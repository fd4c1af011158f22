"""A report's summary: what was timed, how it compares, what is to be known about the samples, and
what failed.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from gdntune.device import arch
from gdntune.errors import counted
from gdntune.kernels import dependent_launch
from gdntune.kernels.spec import BY_INDEX, FLOORS
from gdntune.report import peers
from gdntune.report.document import Block, Bullets, Grid, Section, Text
from gdntune.report.rows import of_run
from gdntune.report.tables import launch_gains
from gdntune.report.words import (
    NOISE_MARK,
    POWER_MARK,
    cell_words,
    geometric_mean,
)
from gdntune.results.baseline import Baseline
from gdntune.results.bootstrap import CONFIDENCE
from gdntune.results.records import (
    LAUNCH,
    NOISY,
    Build,
    Cell,
    Check,
    Record,
    Trial,
    latest,
    made_by,
)
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


def summary(
    sources: Sequence[LoadedRun],
    frame: "pd.DataFrame",
    chosen: "pd.DataFrame",
    baseline: Baseline | None,
) -> Iterator[Block]:
    """A paragraph and the points of each run. chosen: the rows of `frame` that are choices."""
    for source in sources:
        device = source.run.device
        mine = of_run(chosen, source)
        prefix = f"{source.name}: " if len(sources) > 1 else ""
        units = "threads" if device.kind == "cpu" else "SMs"
        policy = source.run.policy
        yield Text(
            f"{prefix}{len(mine)} of {source.cells} cells (a contract at a B, H and HV) have"
            f" {_choice_words(source)} on {device.name} ({device.arch}, {device.sm_count} {units}),"
            f" timed by `{policy.get('timer')}` under `{policy.get('l2')}`."
        )
        lines = [
            *_unfinished_lines(source),
            *_ratio_lines(mine),
            *peers.lines(of_run(frame, source), source.records),
        ]
        lines += _baseline_lines(mine, baseline)
        lines += _launch_lines(source)
        lines += _held_out_lines(source)
        lines.append(_work_line(source))
        lines += _clock_lines(source)
        lines += _noise_lines(source)
        lines += _power_lines(source)
        lines += _precision_lines(source)
        lines += _evidence_lines(source, mine)
        lines += source.notes
        impossible = int(((frame["run"] == source.name) & (frame["status"] == "impossible")).sum())
        if impossible:
            lines.append(
                f"{impossible} times were refused: they are faster than the DRAM's peak allows"
                " under this policy."
            )
        yield Bullets(tuple(lines))


def _choice_words(source: LoadedRun) -> str:
    """What a cell has: of a sweep the variant that it chose, of a bench a time of what the runtime
    called, and the source of that choice.
    """
    if made_by(source.run) == "sweep":
        return "a tuned variant"
    called = [r for r in source.records if isinstance(r, Cell) and isinstance(r.choice, str)]
    usual = sum(r.choice == r.default_variant for r in called)
    if called and usual == len(called):
        return "a time of the default rule's choice"
    return "a time of the table's choice" + (
        f" (at {usual} it is the default rule's)" if usual else ""
    )


def _unfinished_lines(source: LoadedRun) -> Iterator[str]:
    if source.left and isinstance(source.run.cells, int):
        yield (
            f"The {made_by(source.run)} was not finished: {source.run.cells - source.left} of"
            f" {source.run.cells} cells are done. The same command goes on with the others."
        )


def _ratio_lines(mine: "pd.DataFrame") -> Iterator[str]:
    over = mine[mine["over_floor"].notna()]
    if len(over):
        worst = over.loc[over["over_floor"].idxmax()]
        which = " or ".join(sorted(set(over["floor"]), key=FLOORS.index))
        yield (
            f"Time over the floor's (the floor is a kernel that only moves the same state bytes,"
            f" {which}, timed in the same run): {geometric_mean(over['over_floor']):.3f} times in"
            f" the geometric mean, {worst['over_floor']:.3f} times at worst ({cell_words(worst)})."
        )
        by_index = over[over["over_index_floor"].notna() & (over["floor"] != BY_INDEX)]
        if len(by_index):
            yield (
                f"Over a floor that takes the states {BY_INDEX}, shuffled:"
                f" {geometric_mean(by_index['over_index_floor']):.3f} times, at the"
                f" {len(by_index)} cells whose states are more than L2 holds."
            )
        yield (
            "Over the time that all bytes of the problem (inputs and output too) take at the"
            f" floor's rate: {geometric_mean(over['over_bytes_floor']):.3f} times."
        )
    gain = mine[mine["speedup_over_default"].notna()]
    if len(gain):
        best = gain.loc[gain["speedup_over_default"].idxmax()]
        yield (
            "Against the kernels' default rule (the variant that is called without a table):"
            f" {geometric_mean(gain['speedup_over_default']):.3f} times as fast in the geometric"
            f" mean, {best['speedup_over_default']:.3f} at best ({cell_words(best)})."
        )
    share = mine[mine["sol"].notna()]
    if len(share):
        most = share.loc[share["sol"].idxmax()]
        yield (
            f"Share of the DRAM's peak bandwidth: {share['sol'].median():.1%} in the median,"
            f" {most['sol']:.1%} at most ({cell_words(most)}: {most['bound']})."
        )
    if len(mine):
        yield f"Each chosen time is the median of at least {mine['samples'].min()} samples."


def _baseline_lines(mine: "pd.DataFrame", baseline: Baseline | None) -> Iterator[str]:
    """Over what was asked for; for what has a line anyway, none."""
    if baseline is None or baseline.shown:
        return
    over = mine[mine["speedup_over_baseline"].notna()]
    if not len(over):
        yield f"Against {baseline.label}: no cell here has a time of both."
        return
    worst = over.loc[over["speedup_over_baseline"].idxmin()]
    yield (
        f"Against {baseline.label}: {geometric_mean(over['speedup_over_baseline']):.3f} times as"
        f" fast in the geometric mean of {len(over)} cells, {worst['speedup_over_baseline']:.3f} at"
        f" worst ({cell_words(worst)}); slower at {int((over['speedup_over_baseline'] < 1).sum())}."
    )


def _launch_lines(source: LoadedRun) -> Iterator[str]:
    """What dependent launch gains in a sweep; which calls' kernels a bench timed, where any of them
    may use it.
    """
    if made_by(source.run) == "bench":
        allowed = source.run.software.get(LAUNCH)
        if allowed:
            yield f"Ours is what calls get where dependent launch is {allowed}."
        elif source.table and any(
            dependent_launch.uses(v.knobs) for v in source.table.variants.values()
        ):
            yield "Ours uses dependent launch where the table chose it."
        return
    gains = launch_gains(source.table) if source.table else []
    if gains:
        rule, units, best = max(gains, key=lambda found: found[2])
        yield (
            "With dependent launch, where calls allow it, the choices are"
            f" {geometric_mean(gain for _, _, gain in gains):.3f} times as fast as those without in"
            f" the geometric mean of {counted(len(gains), 'cell')}, {best:.3f} at best (T="
            f"{rule.when.tokens}, {units} work units)."
        )


def _choice_led(source: LoadedRun) -> Iterator[bool]:
    """For each held-out cell, whether the table's choice has final samples there."""
    finals = {
        (r.problem, r.variant.id)
        for r in source.records
        if isinstance(r, Trial) and r.to_the_end and r.status == "ok"
    }
    rules = {rule.when: rule for rule in source.table.rules} if source.table else {}
    for problem in {
        r.problem: None for r in source.records if isinstance(r, Cell) and r.purpose == "held-out"
    }:
        rule = rules.get(problem.contract)
        if rule:
            yield (problem, rule.at(problem.work_units).variant) in finals


def _held_out_lines(source: LoadedRun) -> Iterator[str]:
    """What the table loses between the cells that it was made from."""
    e = source.table.evidence if source.table else None
    if e is not None and e.held_out_cells and e.held_out_regret_max is not None:
        mean = (
            f"{e.held_out_regret_mean:.2%} on average, "
            if isinstance(e.held_out_regret_mean, float)
            else ""
        )
        yield (
            f"At {e.held_out_cells} held-out cells, which had no part in choosing, the table's"
            f" choices lose {mean}{e.held_out_regret_max:.2%} at most to the best variant there."
        )
        if unled := sum(not led for led in _choice_led(source)):
            yield (
                f"At {unled} of these the choice was no leader: it has the screen's samples alone,"
                " and no time in the tables below."
            )


def _work_line(source: LoadedRun) -> str:
    # A peer without a time has a line of its own.
    counts = Counter((type(r), r.status == "ok") for r in source.records if not peers.is_theirs(r))
    parts = []
    for kind, one, several in (
        (Build, "object compiled", "objects compiled"),
        (Check, "check against the fp64 reference", "checks against the fp64 reference"),
        (Trial, "timing", "timings"),
    ):
        n = counts[kind, True] + counts[kind, False]
        parts.append(f"{n} {one if n == 1 else several} ({counts[kind, False]} failed)")
    seconds = sum(r.seconds for r in source.records if isinstance(r, Cell))
    return f"{'; '.join(parts)}. Timing took {seconds:.0f} s."


def _clock_lines(source: LoadedRun) -> Iterator[str]:
    """What a clock that was not the device's own says of the cells that were timed meanwhile."""
    looks = [
        [msgspec.convert(clocks, arch.Clocks) for clocks in (r.clocks_before, r.clocks_after)]
        for r in source.records
        if isinstance(r, Cell) and r.status == "ok"
    ]
    if throttled := sum(arch.slowdown(*look) is not None for look in looks):
        cells = counted(throttled, "cell was", "cells were")
        yield f"{cells} timed while heat or power held the clocks down."
    if moved := sum(arch.shift(*look) is not None for look in looks):
        cells = counted(moved, "cell was", "cells were")
        yield (
            f"{cells} timed while a clock moved by more than {arch.SHIFT:.0%}, as at the limit of"
            " power."
        )


def _power_lines(source: LoadedRun) -> Iterator[str]:
    """How many cells were timed at the power limit."""
    if source.power_capped:
        cells = counted(len(source.power_capped), "cell was", "cells were")
        yield (
            f"{cells} timed at the device's power limit, also after a"
            f" pause where the journal is of a version that makes one: marked `{POWER_MARK}` in the"
            " tables."
        )


def _precision_lines(source: LoadedRun) -> Iterator[str]:
    """How well the ratios to the choices are known, where rounds went on until they were."""
    found = [
        (r.interval, r.stop)
        for r in source.records
        if isinstance(r, Cell) and r.status == "ok" and isinstance(r.interval, float)
    ]
    if found:
        wide = sum("cell's time ended" in stop for _, stop in found)
        yield (
            "Samples were taken until each rival's time over the choice's was known well enough"
            f" ({CONFIDENCE:.0%} intervals), or the cell's time ran out, as at {wide} of"
            f" {len(found)} cells. The widest interval is +-{max(x for x, _ in found):.2%}."
        )


def _evidence_lines(source: LoadedRun, mine: "pd.DataFrame") -> Iterator[str]:
    """On which samples a sweep's choices are shown."""
    if made_by(source.run) == "bench" or not len(mine):
        return
    fresh = int((mine["stage"] == "evidence").sum())
    if fresh:
        yield (
            f"The times of {fresh} of {len(mine)} choices were taken anew after the choice, on"
            " fresh tensors."
        )
    if fresh < len(mine):
        choices = counted(len(mine) - fresh, "choice has", "choices have")
        them = "it" if fresh + 1 == len(mine) else "them"
        yield (
            f"{choices} the times by which the sweep chose {them}, which flatters {them}; a sweep"
            " by this version times each choice again."
        )


def _noise_lines(source: LoadedRun) -> Iterator[str]:
    """How many cells have times that cannot be believed, and why the first one's cannot."""
    if source.noise:
        problem, reason = next(iter(source.noise.items()))
        yield (
            f"{counted(len(source.noise), 'cell is noisy: its', 'cells are noisy: their')} times"
            f" cannot be believed, and are marked `{NOISE_MARK}` in the tables. The first:"
            f" {problem.key()}, {reason.removeprefix(NOISY)}. Give the same command on a"
            " machine that does nothing else: it times these cells again."
        )


def failures(sources: Sequence[LoadedRun]) -> list[Section]:
    """What did not compile, was wrong, crashed or hung, by its reason."""
    counts: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], tuple[str, str]] = {}
    for source in sources:
        for r in latest(source.records):
            if r.status == "ok" or peers.is_theirs(r):
                continue
            # The same fault names other numbers each time.
            reason = " ".join(r.reason.split()) or r.status
            key = (
                f"{type(r).__name__.lower()}, {r.status}",
                re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", reason)[:200],
            )
            counts[key] += 1
            example.setdefault(key, (_subject(r), reason))
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = tuple((what, example[what, reason][1], str(n)) for (what, reason), n in ordered)
    grid = Grid("", ("what", "reason, of the first", "times"), rows, left=2)
    details = tuple(f"`{example[key][0]}`: {example[key][1][:300]}" for key, _ in ordered)
    return [Section("Failures by reason", (grid, Text("The first of each:"), Bullets(details)))]


def _subject(record: Record) -> str:
    """What a record is about: its cell, or its variant."""
    if isinstance(record, Cell):
        return record.problem.key()
    return record.variant.id if isinstance(record, Trial) else record.variant
