"""What a report says: from sweeps and their frame to sections. Plain words first, then the tables,
then how to get them again.
"""

import math
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec

from gdntune.device import arch
from gdntune.errors import counted
from gdntune.kernels.spec import BY_INDEX, FLOORS
from gdntune.problem import Contract
from gdntune.report import peers, workload
from gdntune.report.document import Block, Bullets, Code, Document, Grid, Section, Text
from gdntune.report.words import (
    MISSING,
    NOISE_MARK,
    POWER_MARK,
    bound_mark,
    cell_words,
    contract_form,
    contract_rest,
    contract_short,
    contract_words,
    geometric_mean,
    marked,
    number,
    ranges,
    ratio,
    size_names,
)
from gdntune.results.baseline import Baseline
from gdntune.results.bootstrap import CONFIDENCE
from gdntune.results.journal import NOISY, Build, Cell, Check, Record, Run, Trial, latest, made_by
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


# From so many sections of contracts on they are numbered, a table leads to them, and the terminal
# shows that alone after a sweep.
MANY = 4
# Tables of B x T are split by T so that a line stays within document.WIDTH.
TOKENS_A_TABLE = 8
L2_POLICIES = {
    "cold-clean": (
        "before each call a buffer of at least twice the last-level cache is read, so the cache"
        " holds unmodified lines of other data, as in a model whose other layers just ran"
    ),
    "cold-dirty": (
        "before each call a buffer larger than the last-level cache is zeroed, so its modified"
        " lines must be written back while the call runs"
    ),
    "rotate": "each call takes other slots of a pool much larger than the last-level cache",
    "warm": "nothing is done before a call: what fits into the last-level cache stays there",
    "chain": (
        "a time is what the call adds to a chain of layers in a CUDA graph, a layer (on a CPU: the"
        " clock around it there): each layer has a pool of its own in shuffled slots, inputs"
        " written just before, a use of the output, and a read of weights"
    ),
}
TIMERS = {
    "cupti": (
        "CUPTI's kernel records, from the first kernel's start to the last one's end, in steps of"
        " 32 ns"
    ),
    "events": "CUDA events around the call, launch gaps included, in steps of 0.5 us",
    "graph": (
        "a CUDA graph that holds the calls less one without them, over the calls: the gap between"
        " two kernels, and what the next one waits for the call's writes, are included"
    ),
    "cpu": "the host's clock around the call",
}


def document(
    sources: Sequence[LoadedRun],
    frame: "pd.DataFrame",
    letters: "Letters",
    more: Sequence[Section] = (),
    baseline: Baseline | None = None,
    options: Sequence[str] = (),
) -> Document:
    """The whole report. letters: filled with the variants that its tables name. more: sections
    after the contracts'. options: what the command said beside the runs.
    """
    chosen = frame[frame["chosen"]]
    sections = [Section("Summary", tuple(_summary(sources, frame, chosen, baseline)))]
    for source in sources:
        title = f"Peers of {source.name}" if len(sources) > 1 else "Peers"
        mine = of_run(frame, source)
        sections.append(Section(title, tuple(peers.blocks(mine, source.records))))
        if isinstance(source.run.workload, tuple):
            title = f"Workload of {source.name}" if len(sources) > 1 else "Workload"
            label = partial(peers.label, records=source.records)
            sections += workload.sections(
                source.run.workload,
                bases(source),
                mine[mine["chosen"]],
                peers.rivals(mine),
                label,
                title,
            )
    # Failures before the tables: they say what the tables lack.
    sections += _failures(sources)
    subjects = [(source, base) for source in sources for base in bases(source)]
    numbered = len(subjects) >= MANY
    if numbered:
        sections.append(Section("Contracts", tuple(_contents(subjects, chosen))))
    for i, (source, base) in enumerate(subjects, 1):
        words = contract_words(base)
        title = (
            f"{f'{i}. ' if numbered else ''}{f'{source.name}: ' if len(sources) > 1 else ''}{words}"
        )
        part = of_contract(of_run(chosen, source), base)
        others = of_contract(peers.rivals(of_run(frame, source)), base)
        blocks = tuple(_contract_blocks(part, letters, others, baseline))
        sections.append(Section(title, blocks, detail=numbered, subject=(source.name, base.key())))
    sections += _differences(sources, chosen, letters)
    sections += more
    sections.append(
        Section("How to read the tables", tuple(_reading(sources, chosen)), detail=True)
    )
    for source in sources:
        title = f"Environment of {source.name}" if len(sources) > 1 else "Environment"
        sections.append(Section(title, tuple(_environment(source)), detail=True))
    sections.append(Section("How to reproduce", tuple(_reproduce(sources, options)), detail=True))
    names = dict.fromkeys(s.name for s in sources)
    return Document(f"gdntune report: {', '.join(names)}", tuple(s for s in sections if s.blocks))


# -- summary


def _summary(
    sources: Sequence[LoadedRun],
    frame: "pd.DataFrame",
    chosen: "pd.DataFrame",
    baseline: Baseline | None,
) -> Iterator[Block]:
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
            f"Time over the floor (a kernel that only moves the same state bytes, {which}, same"
            f" run): {geometric_mean(over['over_floor']):.3f} in the geometric mean,"
            f" {worst['over_floor']:.3f} at worst ({cell_words(worst)})."
        )
        by_index = over[over["over_index_floor"].notna() & (over["floor"] != BY_INDEX)]
        if len(by_index):
            yield (
                f"Over the floor {BY_INDEX}, shuffled:"
                f" {geometric_mean(by_index['over_index_floor']):.3f} at the {len(by_index)} cells"
                " whose states are more than L2 holds."
            )
        yield (
            "Over all bytes of the problem at the floor's rate:"
            f" {geometric_mean(over['over_bytes_floor']):.3f}."
        )
    gain = mine[mine["speedup_over_default"].notna()]
    if len(gain):
        best = gain.loc[gain["speedup_over_default"].idxmax()]
        yield (
            f"Against the kernels' default rule: {geometric_mean(gain['speedup_over_default']):.3f}"
            f" times as fast in the geometric mean, {best['speedup_over_default']:.3f} at best"
            f" ({cell_words(best)})."
        )
    share = mine[mine["sol"].notna()]
    if len(share):
        most = share.loc[share["sol"].idxmax()]
        yield (
            f"Share of the DRAM's peak: {share['sol'].median():.1%} in the median,"
            f" {most['sol']:.1%} at most ({cell_words(most)}: {most['bound']})."
        )
    if len(mine):
        yield f"Samples behind a chosen time: {mine['samples'].min()} at least."


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


def _failures(sources: Sequence[LoadedRun]) -> list[Section]:
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


# -- contracts


def _contents(
    subjects: Sequence[tuple[LoadedRun, Contract]], chosen: "pd.DataFrame"
) -> Iterator[Block]:
    """A row a section of a contract, by its number: how many cells, how near to the floor."""
    rows, shades = [], []
    for i, (source, base) in enumerate(subjects, 1):
        mine = of_contract(of_run(chosen, source), base)
        over, share = mine["over_floor"].dropna(), mine["sol"].dropna()
        sol = float(share.median()) if len(share) else None
        rows.append(
            (
                str(i),
                contract_form(base),
                contract_rest(base),
                ranges(mine["tokens"]),
                str(len(mine)),
                ratio(geometric_mean(over)) if len(over) else MISSING,
                ratio(float(over.max())) if len(over) else MISSING,
                MISSING if sol is None else f"{100 * sol:.0f}",
            )
        )
        shades.append((*(None,) * 7, sol))
    headers = ("#", "contract", "and", "T", "cells", "floor", "worst", "SOL %")
    yield Text(
        "Time over the floor, in the geometric mean and at worst; share of the DRAM's peak in the"
        " median."
    )
    links = tuple((source.name, base.key()) for source, base in subjects)
    yield Grid("", headers, tuple(rows), tuple(shades), left=4, subjects=links)


def _contract_blocks(
    chosen: "pd.DataFrame", letters: "Letters", others: "pd.DataFrame", baseline: Baseline | None
) -> Iterator[Block]:
    if not len(chosen):
        yield Text("No cell of this contract has a checked variant with final samples.")
        return
    cells = {
        (c["tokens"], c["work_units"], c["B"], c["HV"], c["H"]): c for _, c in chosen.iterrows()
    }
    yield from _grids(
        "Time, us (median of the chosen variant)", cells, lambda c: number(c["median_us"])
    )
    yield from _grids("Share of the DRAM's peak, %", cells, _share)
    if chosen["over_floor"].notna().any():
        # a small pool's floor is in order, also where an older journal's large ones are not
        which = ", or ".join(sorted(set(chosen["floor"]) - {MISSING}, key=FLOORS.index))
        yield from _grids(f"Time over the floor ({which})", cells, lambda c: ratio(c["over_floor"]))
    if chosen["speedup_over_default"].notna().any():
        yield from _grids(
            "Speed-up over the default rule", cells, lambda c: ratio(c["speedup_over_default"])
        )
    for kernel in peers.names(others):
        theirs = {_cell_of(r): r for _, r in others[others["kernel"] == kernel].iterrows()}

        def gain(c: Any, theirs: dict[tuple[Any, ...], Any] = theirs) -> str:
            found = theirs.get(_cell_of(c))
            return MISSING if found is None else ratio(found["chosen_speedup"])

        yield from _grids(f"Speed-up over {kernel.removeprefix(peers.PREFIX)}", cells, gain)
    if (
        baseline is not None
        and not baseline.shown
        and chosen["speedup_over_baseline"].notna().any()
    ):
        yield from _grids(
            f"Speed-up over {baseline.label}", cells, lambda c: ratio(c["speedup_over_baseline"])
        )
    yield from _grids("Which variant was chosen", cells, lambda c: letters[c["variant"]])
    counts = Counter(chosen["variant"])
    # Z before AA.
    legend = sorted(counts, key=lambda name: (len(letters[name]), letters[name]))
    yield Bullets(
        tuple(
            f"{letters[name]}: `{name}`, {counts[name]} cell{'s' * (counts[name] > 1)}"
            for name in legend
        )
    )


def _grids(
    caption: str, cells: dict[tuple[int, int, int, int, int], Any], show: Callable[[Any], str]
) -> Iterator[Grid]:
    """Tables of B x T: a row a B and heads, at most TOKENS_A_TABLE columns of T. cells: by T, work
    units, B, HV and H.
    """
    tokens = sorted({t for t, *_ in cells})
    rows = sorted({key[1:] for key in cells})
    names = size_names([(B, HV, H) for _, B, HV, H in rows])
    for first in range(0, len(tokens), TOKENS_A_TABLE):
        shown = tokens[first : first + TOKENS_A_TABLE]
        lines, shades = [], []
        for name, row in zip(names, rows, strict=True):
            found = [cells.get((t, *row)) for t in shown]
            lines.append(
                (name, str(row[0]), *(MISSING if c is None else marked(c, show(c)) for c in found))
            )
            shades.append(
                (
                    None,
                    None,
                    *(None if c is None or math.isnan(c["sol"]) else c["sol"] for c in found),
                )
            )
        yield Grid(
            caption,
            ("B x HV", "work units", *(f"T={t}" for t in shown)),
            tuple(lines),
            tuple(shades),
        )


def _share(cell: Any) -> str:
    if math.isnan(cell["sol"]):
        return MISSING
    return f"{100 * cell['sol']:.1f}{bound_mark(cell['bound'])}"


def _differences(
    sources: Sequence[LoadedRun], chosen: "pd.DataFrame", letters: "Letters"
) -> list[Section]:
    """Where two runs on one device, under different policies, choose differently."""
    sections = []
    for one, other in combinations(sources, 2):
        # Runs on two devices differ in everything; only a policy's own effect is of interest here.
        if one.run.device.name != other.run.device.name or one.run.policy == other.run.policy:
            continue
        left, right = (
            {_cell_of(c): c for _, c in of_run(chosen, s).iterrows()} for s in (one, other)
        )
        # In the first run's order, which is that of its tables.
        shared = [key for key in left if key in right]
        apart = [key for key in shared if left[key]["variant"] != right[key]["variant"]]
        if not shared:
            continue
        names = [f"{s.run.policy.get('timer')}/{s.run.policy.get('l2')}" for s in (one, other)]
        rows = tuple(
            (
                contract_short(left[key]),
                f"{left[key]['B']} x {left[key]['HV']}",
                letters[left[key]["variant"]],
                number(left[key]["median_us"]),
                letters[right[key]["variant"]],
                number(right[key]["median_us"]),
            )
            for key in apart
        )
        text = (
            f"{one.name} and {other.name} share {len(shared)} cells and choose differently at"
            f" {len(apart)}."
        )
        grid = Grid("", ("contract", "B x HV", names[0], "us", names[1], "us"), rows, left=3)
        sections.append(
            Section("Where the policies differ", (Text(text), *((grid,) if rows else ())))
        )
    return sections


# -- what a reader needs to judge and to repeat


def _reading(sources: Sequence[LoadedRun], chosen: "pd.DataFrame") -> Iterator[Block]:
    timers, policies = (
        dict.fromkeys(s.run.policy.get(key, "") for s in sources) for key in ("timer", "l2")
    )
    lines = [f"Timer `{name}`: {TIMERS.get(name, 'unknown to this version')}." for name in timers]
    lines += [
        f"L2 policy `{name}`: {L2_POLICIES.get(name, 'unknown to this version')}."
        for name in policies
    ]
    lines.append(
        "The variants of a cell are timed interleaved, in mirrored order; the leaders again on"
        " fresh samples, and the choice is by the means of those. Times within the larger of 1% and"
        " 32 ns are a tie."
    )
    lines.append(
        "Share of the peak: bytes that must move (the state read, and written where it is kept; q,"
        " k, v, gates, output once) over time, over the DRAM's peak. Marked `l`: latency-bound,"
        " fixed costs decide. Marked `c`: L2-assisted, writes may stay in the cache, so more than"
        " 100% can be true."
    )
    lines.append(
        "Each variant agreed with an fp64 reference before it was timed. B is the batch, T the"
        " tokens of a call, HV the value heads."
    )
    if any(peers.is_theirs(r) for s in sources for r in s.records):
        lines.append(peers.READING)
    bounds = Counter(chosen["bound"])
    if bounds:
        lines.append(
            "Cells by bound: "
            + ", ".join(f"{n} {name}" for name, n in sorted(bounds.items()))
            + "."
        )
    yield Bullets(tuple(lines))


def _environment(source: LoadedRun) -> Iterator[Block]:
    run, device = source.run, source.run.device
    peak = (
        f"{source.peak_gb_s:.0f} GB/s ({device.peak_source if device.peak_gb_s else 'measured'})"
        if source.peak_gb_s
        else "unknown"
    )
    rows = [
        ("device", f"{device.name}, {device.arch}"),
        ("threads" if device.kind == "cpu" else "SMs", str(device.sm_count)),
        (
            "last-level cache" if device.kind == "cpu" else "L2",
            f"{device.l2_bytes / 2**20:.1f} MiB",
        ),
        ("memory", f"{device.memory_bytes / 2**30:.1f} GiB"),
        ("DRAM's peak", peak),
        *((f"peak, {name}", f"{value:.0f} GB/s") for name, value in sorted(run.peaks.items())),
        *(sorted(run.software.items())),
        *((f"kernel {name}", fingerprint) for name, fingerprint in sorted(run.kernels.items())),
        *_card_rows(run),
        ("started", run.started),
        ("config", f"{run.config}, sha256 {run.config_sha256[:16]}"),
        ("journal", f"sha256 {source.digest[:16]}"),
    ]
    yield Grid("", ("what", "value"), tuple(rows), left=2)
    oddity = arch.peak_disagreement(dict(run.peaks)) if device.kind == "cuda" else None
    if oddity:
        yield Text(f"The peaks disagree: {oddity}.")


def _card_rows(run: Run) -> Iterator[tuple[str, str]]:
    """The GPUs that timed, as they were when the run began."""
    for card in run.cards if isinstance(run.cards, tuple) else ():
        said = [
            *([] if card.power_limit_w is None else [f"{card.power_limit_w:.0f} W"]),
            *([] if card.ecc is None else [f"ECC {'on' if card.ecc else 'off'}"]),
            *([] if card.temperature_c is None else [f"{card.temperature_c} C at the start"]),
        ]
        yield "GPU", ", ".join([card.uuid or "unknown", *said])


def _reproduce(sources: Sequence[LoadedRun], options: Sequence[str]) -> Iterator[Block]:
    commands = list(
        dict.fromkeys(
            s.run.command or f"gdntune sweep configs/{s.run.config}.yaml" for s in sources
        )
    )
    yield Text(
        "On the same device, with the versions above (a sweep in a folder that holds its journal"
        " goes on, so name a new one throughout):"
    )
    folders = " ".join(dict.fromkeys(map(_folder, sources)))
    regrets = dict.fromkeys(s.regret for s in sources if s.regret is not None)
    words = [
        *(f"--regret {r:g}" for r in regrets),
        *(shlex.quote(word) for word in options),
        "--format md",
    ]
    yield Code("\n".join([*commands, f"gdntune report {folders} {' '.join(words)}"]))


def _folder(source: LoadedRun) -> str:
    """Where a run was written, as its command says it: --out, else the command's default."""
    # Quoted words too, since a folder may have blanks in its name.
    named = re.search(r"""--out[ =]((?:'[^']*'|"[^"]*"|[^\s'"])+)""", source.run.command)
    if named:
        return named[1]
    return shlex.quote(
        f"results/{source.run.config}{'-bench' if made_by(source.run) == 'bench' else ''}"
    )


# -- helpers


class Letters(dict[str, str]):
    """A short name for each variant, A, B, ... Z, AA, ..., in the order in which they are asked
    for; the same in all tables.
    """

    def __missing__(self, name: str) -> str:
        n, letters = len(self) + 1, ""
        while n:
            # Counting without a zero, as a spreadsheet names its columns.
            n, digit = divmod(n - 1, 26)
            letters = chr(ord("A") + digit) + letters
        self[name] = letters
        return letters


def bases(source: LoadedRun) -> list[Contract]:
    """A sweep's contracts without T, a section each: usual sizes and few unusual fields first.

    Those of which a cell was tried, or a check failed: of what only passed its check there is
        nothing to say yet.
    """
    # by problem first: a hundred trials share one
    tried = {r.problem for r in source.records if isinstance(r, (Cell, Trial))}
    found = {problem.contract for problem in tried}
    found |= {r.contract for r in source.records if isinstance(r, Check) and r.status != "ok"}
    plain = Contract()

    def order(c: Contract) -> tuple[Any, ...]:
        unusual = sum(
            getattr(c, name) != getattr(plain, name) for name in Contract.__struct_fields__
        )
        return c.op, (c.K, c.V) != (plain.K, plain.V), c.layout, unusual, c

    return sorted({c.replace(tokens=1) for c in found}, key=order)


def of_run(frame: "pd.DataFrame", source: LoadedRun) -> "pd.DataFrame":
    """The rows of a run."""
    its = frame["run"] == source.name
    # As it stands where it has one run only: a copy of a long journal's takes a while.
    return frame if its.all() else frame[its]


def of_contract(frame: "pd.DataFrame", base: Contract) -> "pd.DataFrame":
    """The rows of a contract at every T."""
    its = (frame[n] == getattr(base, n) for n in Contract.__struct_fields__ if n != "tokens")
    # Taken out once: each time copies all columns.
    return frame[reduce(operator.and_, its)]


def _cell_of(row: Any) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*Contract.__struct_fields__, "B", "H", "HV"))


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
            f"Rounds went on until the {CONFIDENCE:.0%} intervals of the ratios to the choice were"
            f" narrow enough, or the cell's time ended, as it did at {wide} of {len(found)} cells:"
            f" half the widest is {max(x for x, _ in found):.2%}."
        )


def _evidence_lines(source: LoadedRun, mine: "pd.DataFrame") -> Iterator[str]:
    """On which samples a sweep's choices are shown."""
    if made_by(source.run) == "bench" or not len(mine):
        return
    fresh = int((mine["stage"] == "evidence").sum())
    if fresh:
        yield (
            f"{fresh} of {len(mine)} choices are shown by samples that were taken after the choice,"
            " on tensors of their own."
        )
    if fresh < len(mine):
        choices = counted(len(mine) - fresh, "choice is", "choices are")
        them = "it" if fresh + 1 == len(mine) else "them"
        yield (
            f"{choices} shown by the samples that chose {them}, which flatters {them}: a sweep of"
            " today times each again."
        )


def _noise_lines(source: LoadedRun) -> Iterator[str]:
    """How many cells have times that cannot be believed, and why the first one's cannot."""
    if source.noise:
        problem, reason = next(iter(source.noise.items()))
        yield (
            f"{counted(len(source.noise), 'cell is noisy: its', 'cells are noisy: their')} times"
            f" cannot be believed, and are marked `{NOISE_MARK}` in the tables. The first:"
            f" {problem.key()}, {reason.removeprefix(NOISY)}. The same command times them again;"
            " give it on a machine that does nothing else."
        )
