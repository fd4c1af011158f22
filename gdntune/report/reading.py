"""What a reader needs to judge a report and to repeat it: how to read it, where it was measured, by
which command.
"""

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gdntune.device import arch
from gdntune.kernels import KERNELS
from gdntune.kernels.spec import Variant
from gdntune.report import peers
from gdntune.report.document import Block, Bullets, Code, Grid, Text
from gdntune.results.records import Run, Trial, made_by
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


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


def reading(sources: Sequence[LoadedRun], chosen: "pd.DataFrame") -> Iterator[Block]:
    """How times were taken, and what the words and marks of the tables mean."""
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
        "Share of the DRAM's peak bandwidth: bytes that must move (the state read, and written"
        " where it is kept; q, k, v, gates, output once) over time, over that peak. Marked `l`:"
        " latency-bound, fixed costs decide. Marked `c`: L2-assisted, writes may stay in the cache,"
        " so more than 100% can be true."
    )
    lines.append(
        "Each variant agreed with an fp64 reference before it was timed. B is the batch, T the"
        " tokens of a call, H the q/k heads, HV the value heads, K and V the head sizes; work units"
        " are B x HV. Mode `update` writes the final state, `frozen` does not."
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


def knobs(sources: Sequence[LoadedRun], chosen: "pd.DataFrame") -> Iterator[Block]:
    """What the parts of the choices' ids mean, see `knobs_of`."""
    ids = set(chosen["variant"])
    yield from knobs_of(
        {
            r.variant
            for s in sources
            for r in s.records
            if isinstance(r, Trial) and r.variant.id in ids
        }
    )


def knobs_of(variants: Iterable[Variant]) -> Iterator[Block]:
    """What the parts of variants' ids mean: of each kernel that is installed, the knobs that the
    ids name.
    """
    named = dict[str, set[str]]()
    for variant in variants:
        if variant.kernel not in KERNELS:
            continue
        defaults = {f.name: f.default for f in dataclasses.fields(KERNELS[variant.kernel].knobs)}
        said = {n for n, x in variant.knobs.items() if n in defaults and x != defaults[n]}
        named.setdefault(variant.kernel, set()).update(said)
    lines = [
        f"`{kernel}`, `{f.metadata['tag']}` ({f.name}): {f.metadata['doc']}"
        for kernel in sorted(named)
        for f in dataclasses.fields(KERNELS[kernel].knobs)
        if f.name in named[kernel]
    ]
    if lines:
        yield Text(
            "An id is the kernel's name, then a tag and a value for each knob that is not at its"
            " default (a tag alone where the value is true):"
        )
        yield Bullets(tuple(lines))


def environment(source: LoadedRun) -> Iterator[Block]:
    """The device, its cards and the software of a run."""
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


def reproduce(sources: Sequence[LoadedRun], options: Sequence[str]) -> Iterator[Block]:
    """The commands that make the runs and this report again."""
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
