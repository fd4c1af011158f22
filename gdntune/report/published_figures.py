"""The tables of README and docs/results.md, from published journals; `published_pages` writes them
into the pages.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdntune.report.peers import PREFIX, compared, label, rivals
from gdntune.report.words import POWER_MARK, geometric_mean
from gdntune.results.frame import frame
from gdntune.results.records import Record
from gdntune.results.samples import LoadedRun, load

if TYPE_CHECKING:
    import pandas as pd

HEADLINE = "H200"
GPUS = {"H100": "nvidia-h100-80gb-hbm3", "H200": "nvidia-h200"}
# The sweeps that `times` shows; of a cell that was swept again, the later one.
SWEEPS = {
    "H100": ("qwen3.5-397b-a17b", "kimi-linear-48b-a3b"),
    "H200": (
        "shipped.gdn",
        "shipped.kda",
        "shipped.gdn-model.gdn-model-waves.gdn-verify-outputs.t4-8",
        "shipped.gdn-model.gdn-model-waves.gdn-verify-outputs.t5",
        "shipped.gdn-model.gdn-model-waves.gdn-verify-outputs.t2-3",
        "shipped.kda-model.kda-model-waves.kda-verify-outputs.t4-5-8",
        "shipped.kda-model.kda-model-waves.kda-verify-outputs.t2-3",
    ),
}
PEERS = {"flashinfer": "FlashInfer", "sglang": "SGLang", "vllm": "vLLM", "fla": "fla"}
# Who else makes a layer's step: our delta rule between vLLM's convolution and norm.
APART = {"apart": "ours, apart"}
# Journals of a folder: ours beside other libraries', alone, alone by the calls that their engines
# make today, and in a chain of layers.
ALONE, AS_CALLED = "bench-peers.jsonl.xz", "bench-peers.as-called.jsonl.xz"
CHAIN = "bench-chain.jsonl.xz"
# several tokens, final state and outputs alone, again by later tables
SEVERAL = "bench-several.jsonl.xz"
# A layer's step and drafts behind a ring, each in both policies; KDA's step again by a later sweep.
STEPS = {
    "bench-layer.jsonl.xz": "in a chain of layers",
    "bench-layer.kda.jsonl.xz": "in a chain of layers, KDA again",
    "bench-layer.kda.again.jsonl.xz": "in a chain of layers, KDA again",
    "bench-layer.kda.alone.jsonl.xz": "in a chain of layers, without dependent launch",
    "bench-layer.kda.again.alone.jsonl.xz": "in a chain of layers, without dependent launch",
    "bench-layer.cold.jsonl.xz": "alone, cold L2",
    "bench-layer.kda.cold.jsonl.xz": "alone, cold L2, KDA again",
    "bench-layer.kda.again.cold.jsonl.xz": "alone, cold L2, KDA again",
}
# What was timed again by later tables: those cells' rows of the first are not what ships.
AGAIN = {
    AS_CALLED: SEVERAL,
    "bench-layer.jsonl.xz": "bench-layer.kda.jsonl.xz",
    "bench-layer.cold.jsonl.xz": "bench-layer.kda.cold.jsonl.xz",
    "bench-layer.kda.jsonl.xz": "bench-layer.kda.again.jsonl.xz",
    "bench-layer.kda.cold.jsonl.xz": "bench-layer.kda.again.cold.jsonl.xz",
    "bench-layer.kda.alone.jsonl.xz": "bench-layer.kda.again.alone.jsonl.xz",
}
RINGS = {
    "bench-ring.jsonl.xz": "alone, cold L2",
    "bench-ring.chain.jsonl.xz": "in a chain of layers",
}
# The corner of the tables of geometric means.
BESIDE = {
    ALONE: "",
    AS_CALLED: "as engines call them",
    SEVERAL: "as engines call them, several tokens again",
    CHAIN: "in a chain of layers",
}
# Those that have a table of verdicts, and its corner.
VERDICTS = {
    AS_CALLED: "as engines call them",
    SEVERAL: "several tokens again",
    CHAIN: "in a chain",
    **{name: f"a layer's step, {policy}" for name, policy in STEPS.items()},
    **{name: f"drafts behind a ring, {policy}" for name, policy in RINGS.items()},
}
# Of a cell's words, what a page says instead.
_WORDS = {
    "gdn_decode": "GDN",
    "kda_decode": "KDA",
    " frozen none": " outputs alone",
    " frozen slots": " a slot a token",
    ", at the power limit": " (at the power limit)",
}
# What a choice may lose in the shipped tables, as tables/README.md says; journals have the sweeps'.
REGRET = 0.005
BATCHES = (1, 16, 64, 256, 512)
TOKENS = (1, 4, 8)
# What the rows of `times` have in common: the shipped configs' usual contract.
_USUAL: dict[str, Any] = {
    "mode": "update",
    "intermediate": "none",
    "layout": "k_last",
    "pool": True,
    "accepted": False,
    "ragged": False,
}
# Of a sweep of all contracts besides: the models' own.
_MODELS: dict[str, Any] = {**_USUAL, "beta": "logit", "dt_bias_dtype": "fp32", "K": 128}


class _Group(NamedTuple):
    """A row of the table of peers: its words, `{T}` standing for the cells' T, and what its cells'
    contracts have.
    """

    words: str
    fields: dict[str, Any]
    tokens: Sequence[int] = (1,)


def _group(words: str, op: str, state: str, tokens: Sequence[int] = (1,), **fields: Any) -> _Group:
    return _Group(words, {"op": op, "state_dtype": state, **_USUAL, **fields}, tokens)


_SEVERAL = tuple(range(2, 9))
_GDN, _KDA = "gdn_decode", "kda_decode"
_DENSE = {"mode": "frozen", "intermediate": "dense"}
_SLOTS = {"mode": "frozen", "intermediate": "slots", "accepted": True, "ragged": True}
GROUPS = (
    _group("GDN {T}, bf16 state", _GDN, "bf16"),
    _group("GDN {T}, fp32 state", _GDN, "fp32"),
    _group("GDN {T}, bf16, states in order", _GDN, "bf16", pool=False),
    _group("GDN {T}, fp32, states in order", _GDN, "fp32", pool=False),
    _group("GDN {T}, fp32, states in order, V-last", _GDN, "fp32", pool=False, layout="v_last"),
    _group("GDN {T}, bf16, final state", _GDN, "bf16", _SEVERAL),
    _group("GDN {T}, fp32, final state", _GDN, "fp32", _SEVERAL),
    _group("GDN {T}, fp32, final state, states in order", _GDN, "fp32", _SEVERAL, pool=False),
    _group("GDN {T}, bf16, intermediate states", _GDN, "bf16", _SEVERAL, **_DENSE),
    _group("GDN {T}, fp32, intermediate states", _GDN, "fp32", _SEVERAL, **_DENSE),
    _group("GDN {T}, bf16, outputs alone", _GDN, "bf16", _SEVERAL, mode="frozen"),
    _group("KDA {T}, bf16 state", _KDA, "bf16"),
    _group("KDA {T}, fp32 state", _KDA, "fp32"),
    _group("KDA {T}, bf16, states in order", _KDA, "bf16", pool=False),
    _group("KDA {T}, fp32, states in order", _KDA, "fp32", pool=False),
    _group(
        "KDA {T}, bf16, a slot a token",
        _KDA,
        "bf16",
        _SEVERAL,
        mode=None,
        intermediate="slots",
        accepted=None,
    ),
    _group("KDA {T}, bf16, outputs alone", _KDA, "bf16", _SEVERAL, mode="frozen"),
    _group("GDN {T}, bf16, a slot a token", _GDN, "bf16", _SEVERAL, **_SLOTS),
    _group("GDN {T}, fp32, a slot a token", _GDN, "fp32", _SEVERAL, **_SLOTS),
)

# Words, op, state, HV, and the batches shown.
README_ROWS = (
    ("GDN, bf16 state", _GDN, "bf16", 64, (1, 64)),
    ("GDN, fp32 state", _GDN, "fp32", 64, (64, 512)),
    ("KDA, bf16 state", _KDA, "bf16", 32, (1,)),
)


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Each table in Markdown, by its name: the times on each GPU, ours beside other libraries', and
    README's. A bench that was not published has none.

    results: the folder of published journals, docs/results.
    """
    found: dict[str, Callable[[], str]] = {}
    for gpu in GPUS:
        found[f"times.{gpu}"] = functools.partial(_times_of, results, gpu)
    for name, corner in BESIDE.items():
        if published := benches(results, name):
            found[f"beside.{stem(name)}"] = functools.partial(beside_others, published, corner)
    for name, policy in {**STEPS, **RINGS}.items():
        for gpu, bench in benches(results, name).items():
            of = functools.partial(by_batch, bench, f"{gpu}, {policy}")
            found[f"batches.{stem(name)}.{gpu}"] = of
    for name, what in VERDICTS.items():
        for gpu, bench in benches(results, name).items():
            of = functools.partial(verdicts, bench, f"{gpu}, {what}")
            found[f"verdicts.{stem(name)}.{gpu}"] = of
    called, chained = (benches(results, name).get(HEADLINE) for name in (AS_CALLED, CHAIN))
    if called and chained:
        found["times.README"] = functools.partial(readme, called, chained)
    return found


def stem(name: str) -> str:
    """A journal's name without what all have."""
    return name.removesuffix(".jsonl.xz")


def chosen_of_models(results: Path, gpu: str) -> "pd.DataFrame":
    """The choices of the sweeps that `times` shows, with the models' usual contracts."""
    rows = _sweeps(tuple(results / GPUS[gpu] / f"{sweep}.jsonl.xz" for sweep in SWEEPS[gpu]))
    cell = ["op", "state_dtype", "tokens", "B", "H", "HV"]
    return _where(rows[rows["chosen"]], _MODELS).drop_duplicates(cell, keep="last")


@functools.cache
def _sweeps(paths: tuple[Path, ...]) -> "pd.DataFrame":
    return frame(load(paths, REGRET), first_looks=False)


def _times_of(results: Path, gpu: str) -> str:
    return times(gpu, chosen_of_models(results, gpu))


def benches(results: Path, name: str) -> "dict[str, Bench]":
    """A bench by the GPUs that it was published of. Read when first asked for anything."""
    found = {gpu: journals(results / folder, name) for gpu, folder in GPUS.items()}
    return {gpu: Bench(tuple(paths)) for gpu, paths in found.items() if paths}


def journals(folder: Path, name: str) -> list[Path]:
    """A bench's journal, and those of the cells that it lacked (`bench --without`), each perhaps of
    another card; empty where it was not published.
    """
    rest = name.replace(".jsonl", ".rest*.jsonl")
    return [folder / name, *sorted(folder.glob(rest))] if (folder / name).exists() else []


class Bench:
    """A bench's journals, and their rows; read once a process, when first asked for."""

    def __init__(self, paths: tuple[Path, ...]):
        self.paths = paths

    @property
    def runs(self) -> Sequence[LoadedRun]:
        """The journals."""
        return _loaded(self.paths)[0]

    @property
    def rows(self) -> "pd.DataFrame":
        """Their frame."""
        return _loaded(self.paths)[1]

    @property
    def records(self) -> list[Record]:
        """Of all journals."""
        return [r for run in self.runs for r in run.records]

    def of(self, peer: str) -> "pd.DataFrame":
        """A library's fastest entries."""
        best = rivals(self.rows)
        return best[best["kernel"] == f"{PREFIX}{peer}"]

    def version(self, peer: str) -> str:
        """The version of a library that was timed, without what a release was made again for."""
        said = label(f"{PREFIX}{peer}", self.records).partition(" ")[2]
        return said.partition(".post")[0]


@functools.cache
def _loaded(paths: tuple[Path, ...]) -> "tuple[Sequence[LoadedRun], pd.DataFrame]":
    runs = load(paths)
    return runs, frame(runs)


def times(gpu: str, found: "pd.DataFrame") -> str:
    """Medians of the tables' choices, `chosen_of_models`, with their time over the floor."""
    cells = {
        (c["op"], c["state_dtype"], c["tokens"], c["B"], c["HV"]): c
        for c in found.to_dict("records")
    }
    rows = []
    for op, HV in ((_GDN, 64), (_KDA, 32)):
        for state in ("bf16", "fp32"):
            for t in TOKENS:
                row = [cells.get((op, state, t, B, HV)) for B in BATCHES]
                words = f"{op.removesuffix('_decode').upper()}, {state} state, T={t}"
                rows.append([words, *("" if c is None else _time(c) for c in row)])
    return markdown([gpu, *(f"B={B}" for B in BATCHES)], rows)


def _time(cell: dict[Any, Any]) -> str:
    return f"{_mark(cell)}{cell['median_us']:.4g} ({cell['over_floor']:.2f})"


def beside_others(found: dict[str, Bench], corner: str = "") -> str:
    """How many times as fast ours is, by medians: geometric mean and worst cell, a column a library
    and GPU; with the version where the GPUs' differ. A library without times has no column.
    """
    headers, columns = [corner], []
    for peer, words in PEERS.items():
        best = {gpu: its for gpu, bench in found.items() if len(its := bench.of(peer))}
        versions = {gpu: found[gpu].version(peer) for gpu in best}
        differ = len(set(versions.values())) > 1
        for n, (gpu, its) in enumerate(best.items()):
            name = [*([] if n else [words]), *([versions[gpu]] if differ else [])]
            headers.append(", ".join([*([" ".join(name)] if name else []), gpu]))
            columns.append(its)
    rows = []
    for group in GROUPS:
        cells = [_of_group(its, group) for its in columns]
        if tokens := sorted({int(t) for its in cells for t in its["tokens"]}):
            words = group.words.replace("{T}", _tokens(tokens))
            rows.append([words, *map(_over, cells)])
    return markdown(headers, rows)


def verdicts(bench: Bench, corner: str) -> str:
    """Each library's cells: theirs over ours by means, geometric mean with its 95% bootstrap
    interval; the worst by medians; how many are FASTER, TIE, SLOWER, UNCLEAR for ours.
    """
    counts = ("FASTER", "TIE", "SLOWER", "UNCLEAR")
    rows = []
    for found in compared(bench.rows, bench.records):
        if found["mean_ratio"]:
            mean, low, high = found["mean_ratio"]
            peer = found["peer"].split()[0]
            rows.append(
                [
                    {**PEERS, **APART}.get(peer, peer),
                    str(found["cells"]),
                    f"{mean:.3f} ({low:.3f} to {high:.3f})",
                    f"{found['worst']:.3f}: {plain(found['worst_cell'])}",
                    *(str(found[name]) for name in counts),
                ]
            )
    return markdown([corner, "cells", "mean (95% interval)", "worst", *counts], rows)


def plain(cell: str) -> str:
    """A cell's words as a page says them."""
    for code, words in _WORDS.items():
        cell = cell.replace(code, words)
    return cell


def by_batch(bench: Bench, corner: str) -> str:
    """Medians by batch, of each contract ours and every library's fastest; bold where theirs is
    faster beyond a tie.
    """
    kinds: dict[tuple[str, str], dict[int, dict[Any, Any]]] = {}
    batches = sorted({int(B) for B in bench.rows["B"]})
    for cell in bench.rows[bench.rows["chosen"]].to_dict("records"):
        kinds.setdefault((kind_words(cell), "gdntune"), {})[cell["B"]] = cell
    for peer, words in {**PEERS, **APART}.items():
        for cell in bench.of(peer).to_dict("records"):
            kinds.setdefault((kind_words(cell), words), {})[cell["B"]] = cell
    rows, before = [], ""
    for what in dict.fromkeys(what for what, _ in kinds):
        for (its, whose), cells in kinds.items():
            if its == what:
                times = [_of_batch(cells.get(B)) for B in batches]
                rows.append(["" if what == before else what, whose, *times])
                before = what
    return markdown([corner, "", *(f"B={B}" for B in batches)], rows)


def _of_batch(cell: dict[Any, Any] | None) -> str:
    if cell is None:
        return ""
    return f"**{us(cell)}**" if cell.get("behind") else us(cell)


def kind_words(cell: Any) -> str:
    """A contract of a layer's step or of a ring, in words."""
    op, state = cell["op"].removesuffix("_decode").upper(), cell["state_dtype"]
    if cell["ring"]:
        return f"{op} T={cell['tokens']}, {state} state, u in {cell['ring_dtype']}"
    what = "norm alone" if cell["conv"] == "none" else "step"
    if cell["conv_window"] != "ring":
        what += f", windows {cell['conv_window'].replace('_', ' ')}"
    return f"{op} {what}, T={cell['tokens']}, {state} state, HV={cell['HV']}"


def _tokens(tokens: Sequence[int]) -> str:
    """T=4, T=2 to 8, or T=2, 4, 8."""
    first, last = tokens[0], tokens[-1]
    if len(tokens) > 2 and list(tokens) == list(range(first, last + 1)):
        return f"T={first} to {last}"
    return (
        f"T={' and '.join(map(str, tokens)) if len(tokens) == 2 else ', '.join(map(str, tokens))}"
    )


def readme(alone: Bench, chain: Bench) -> str:
    """Medians at T=1 beside other libraries, states in a pool, and in brackets what a call costs in
    a chain of layers; a dash where one of the two was not timed. Bold: theirs is the smaller one.
    """
    found = [_at_one_token(bench.rows) for bench in (alone, chain)]
    shown = [p for p in PEERS if p != "fla" and any(key[0] == p for _, its in found for key in its)]
    rows, before = [], ""
    for words, op, state, HV, batches in README_ROWS:
        for B in batches:
            place = op, state, B, HV
            mine = [ours.get(place) for ours, _ in found]
            cells = [_both(*(m and us(m) for m in mine))]
            cells.append(f"{mine[0]['over_floor']:.2f}" if mine[0] else "")
            for peer in shown:
                its = [theirs.get((peer, *place)) for _, theirs in found]
                said = [m and i and _beside(m, i) for m, i in zip(mine, its, strict=True)]
                cells.append(_both(*said))
            rows.append(["" if words == before else words, str(B), *cells])
            before = words
    versions = [f"{PEERS[peer]} {alone.version(peer)}" for peer in shown]
    return markdown(("T=1", "B", "gdntune", "over the floor", *versions), rows)


def _at_one_token(found: "pd.DataFrame") -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Our choices and the libraries' fastest at T=1, by place; theirs by library and place."""
    chosen = _where(found[found["chosen"] & (found["tokens"] == 1)], _USUAL)
    best = _where(rivals(found), {**_USUAL, "tokens": 1})
    ours = {_place(c): c for c in chosen.to_dict("records")}
    theirs = {(c["kernel"].removeprefix(PREFIX), *_place(c)): c for c in best.to_dict("records")}
    return ours, theirs


def _place(cell: dict[Any, Any]) -> tuple[Any, ...]:
    return cell["op"], cell["state_dtype"], cell["B"], cell["HV"]


def _both(alone: str | None, chained: str | None) -> str:
    if not alone and not chained:
        return ""
    return f"{alone or '-'} ({chained or '-'})"


def _mark(cell: dict[Any, Any]) -> str:
    """What stands before a time that was taken at the device's power limit."""
    return POWER_MARK if cell["power_capped"] else ""


def us(cell: dict[Any, Any]) -> str:
    """A median, marked where it was taken at the power limit."""
    us = cell["median_us"]
    return f"{_mark(cell)}{us:.2f}" if us < 10 else f"{_mark(cell)}{us:.1f}"


def _beside(mine: dict[Any, Any], theirs: dict[Any, Any]) -> str:
    faster = theirs["median_us"] < mine["median_us"]
    return f"**{us(theirs)}**" if faster else us(theirs)


def _of_group(found: "pd.DataFrame", group: _Group) -> "pd.DataFrame":
    return _where(found[found["tokens"].isin(group.tokens)], group.fields)


def _where(found: "pd.DataFrame", fields: dict[str, Any]) -> "pd.DataFrame":
    """The rows that have these values; None: any."""
    for name, value in fields.items():
        if value is not None:
            found = found[found[name] == value]
    return found


def _over(rows: "pd.DataFrame") -> str:
    """Geometric mean and worst; bold where ours is behind beyond a tie."""
    if not len(rows):
        return ""
    worst = min(rows.to_dict("records"), key=lambda row: row["chosen_speedup"])
    value = worst["chosen_speedup"]
    # Near 1 the third digit says which side of it.
    said = f"{value:.3f}" if 0.985 <= value < 1.01 else f"{value:.2f}"
    shown = f"**{said}**" if worst["behind"] else said
    return f"{geometric_mean(rows['chosen_speedup']):.2f} ({shown})"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose numbers, from the second column on, are set right."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = f"|---|{'---:|' * (len(headers) - 1)}"
    return "\n".join([line(headers), rule, *map(line, rows)])
