"""`gdntune.tune`: a sweep of what an engine will call, within a budget, for its warm-up."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from gdntune import kernels
from gdntune.device import arch
from gdntune.errors import GdntuneError, JournalError, ToolMissing, UnsupportedProblem
from gdntune.files import write_whole
from gdntune.kernels.spec import Variant
from gdntune.objects.store import NOWHERE, scratch_folder
from gdntune.problem import Contract, Problem, problem_fault
from gdntune.results import judge, table
from gdntune.results.merge import merge
from gdntune.results.table import Table
from gdntune.runtime import dispatch, records
from gdntune.tuning.config import Part

log = logging.getLogger("gdntune")
# An engine that a script started in the background ignores SIGINT, and so would its children.
HEEDS_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
# The sweep's program; what it prints goes to a file.
COMMAND: tuple[str, ...] = (
    sys.executable, "-c", f"{HEEDS_SIGINT}from gdntune.__main__ import main; main()", "sweep"
)  # fmt: skip
# How long a sweep that was told to stop may take to close its journal.
GRACE_S = 15.0
# A quick sweep: half the samples at which a 1% difference decides. A choice is the best of its
# cell, the default rule's among them, and never one that is a tie worse for a smaller table.
SEARCH = {"screen_rounds": 3, "keep": 3, "final_rounds": 100, "fresh_rounds": 0, "regret": 0.0}
# Of a contract, how many variants are taken from its kernels' space where no table names some, and
# how many are tried at most.
FEWEST, MOST = 4, 12


class Tuned(msgspec.Struct, frozen=True):
    """What came of a tuning: the tables that are in use from now on and for the next start, and
    how many of the wanted cells were timed within the budget.
    """

    tables: tuple[Path, ...]
    timed: int
    wanted: int
    seconds: float


def candidates(contract: Contract, work_units: Iterable[int], device: arch.Device) -> list[Variant]:
    """What is worth a budget's compiling: the default rule's choices, then what the shipped tables
    of this kind of device choose for the nearest contract; where there is no table, some of the
    kernels' own space.
    """
    found = [kernels.default(contract, n, device) for n in work_units]
    for path in sorted(dispatch.shipped_tables().glob(f"*/{contract.op}.json")):
        if table.device_of(path).kind == device.kind:
            given = table.load(path)
            for rule in given.ranked(contract)[:1]:
                # a tuning times launches by themselves
                found += [given.variant(i.variant) for i in rule.serving(dependent_launch=False)]
    space = {v.id: v for v in kernels.variants(contract, device)}
    found = [v for v in found if v.id in space]
    if len({v.id for v in found}) < FEWEST:
        found += list(space.values())[:: max(1, len(space) // FEWEST)]
    kept: list[Variant] = []
    for variant in {v.id: v for v in found}.values():
        # a config restricts knob by knob, so that combinations come with them
        part = Part(name="few", kernels=_knobs([*kept, variant]))
        if sum(map(part.admits, space.values())) <= MOST:
            kept.append(variant)
    return kept


def _knobs(variants: Iterable[Variant]) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The values of variants' knobs, as a config restricts a sweep."""
    found: dict[str, dict[str, list[Any]]] = {}
    for v in variants:
        for name, value in v.knobs.items():
            values = found.setdefault(v.kernel, {}).setdefault(name, [])
            if not any(value is x or (type(value) is type(x) and value == x) for x in values):
                values.append(value)
    return {name: {k: tuple(v) for k, v in knobs.items()} for name, knobs in found.items()}


def config_of(problems: Sequence[Problem], device: arch.Device, budget_s: float) -> dict[str, Any]:
    """The config of a sweep of problems: a part for each contract and heads."""
    groups: dict[tuple[Contract, int, int], list[int]] = {}
    for p in problems:
        groups.setdefault((p.contract, p.H, p.HV), []).append(p.B)
    parts = []
    for n, ((c, H, HV), batch) in enumerate(groups.items()):
        fields = msgspec.to_builtins(c)
        K, V, tokens = fields.pop("K"), fields.pop("V"), fields.pop("tokens")
        model = {"H": H, "HV": HV, "K": K, "V": V}
        part = {"name": f"c{n}", "model": model, "batch": sorted(set(batch)), "tokens": [tokens]}
        few = candidates(c, (B * HV for B in sorted(set(batch))), device)
        parts.append({**part, "contracts": [fields], "kernels": _knobs(few)})
    # no cell has more than its share, so that the last is reached
    share = max(0.5, budget_s / 2 / len(problems))
    search = {**SEARCH, "max_cell_seconds": round(min(share, 10.0), 2)}
    return {"name": "tune", "device": device.kind, "search": search, "parts": parts}


def tune(
    contracts: Iterable[Contract],
    batches: Sequence[int],
    *,
    heads: tuple[int, int],
    budget_s: float = 60.0,
    device: str = "cuda",
    index: int = 0,
) -> Tuned:
    """Finds the fastest kernels for contracts at batch sizes, in a process of its own that ends
    with the budget; its table serves this process from now on, and is kept for the next start.

    contracts: what the engine will call; batches: its B; heads: H and HV of a rank. budget_s:
    seconds, compiling included; cells that were not reached are served as before. The table is the
    user's (`gdntune table which`), with the rules of the one that was there for other contracts;
    that one is kept beside it as NAME.json.before. No choice is slower than the default rule's,
    which is timed beside it in each cell.

    UnsupportedProblem for what no kernel serves; ToolMissing without `gdntune[sweep]`, or where the
    sweep failed: it says why.
    """
    problems = [Problem(c, B, *heads) for c in contracts for B in batches]
    if fault := next((f for p in problems if (f := problem_fault(p))), None):
        raise UnsupportedProblem(fault)
    if not problems or not budget_s > 0:
        raise UnsupportedProblem(
            f"{len(problems)} cells in {budget_s} s: expected at least one contract, one batch size"
            " and a budget above 0"
        )
    started = time.monotonic()
    runtime = dispatch.runtime(device, index)
    with scratch_folder() as scratch:
        folder = Path(scratch)
        config = folder / "tune.yaml"  # JSON is YAML
        config.write_text(json.dumps(config_of(problems, runtime.device, budget_s)))
        run = folder / "run"
        said = _sweep(config, run, runtime.device.kind, index, budget_s)
        try:
            made = judge.replay(run, keep_default=True).table
        except (JournalError, OSError) as e:
            raise ToolMissing(
                f"no cell was timed within {budget_s:g} s: {said or e}; a larger budget_s, or"
                " objects compiled ahead (`gdntune compile`), let it get further"
            ) from None
    tables = tuple(
        _keep(made, op, runtime.device) for op in sorted({r.when.op for r in made.rules})
    )
    for path in tables:
        runtime.use(path)
    records.forget()
    seconds = time.monotonic() - started
    log.info("tuned %d of %d cells in %.0f s", made.evidence.cells, len(problems), seconds)
    return Tuned(tables, made.evidence.cells, len(problems), seconds)


def _sweep(config: Path, run: Path, kind: str, index: int, budget_s: float) -> str:
    """Sweeps until it is done or the budget is spent; the last line that it printed."""
    where = ["--device", kind, *(["--index", str(index)] if kind == "cuda" else [])]
    with (config.parent / "printed").open("w+b") as printed:
        process = subprocess.Popen(
            [*COMMAND, str(config), "--out", str(run), *where],
            stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(budget_s)
        except subprocess.TimeoutExpired:
            # as Ctrl-C: what was journalled stays
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _last_line(printed)


def _last_line(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _keep(made: Table, op: str, device: arch.Device) -> Path:
    """Puts a table's rules for an op where the runtime looks for the user's; returns the file."""
    target = dispatch.user_tables() / device.slug / f"{op}.json"
    if target.is_relative_to(NOWHERE):
        raise ToolMissing(
            "this user has no home folder to keep a table in: set XDG_DATA_HOME to a folder that"
            " can be written"
        )
    own = msgspec.structs.replace(made, rules=tuple(r for r in made.rules if r.when.op == op))
    named = {i.variant for rule in own.rules for i in rule.every}
    variants = {name: v for name, v in own.variants.items() if name in named}
    own = msgspec.structs.replace(own, variants=variants)
    try:
        if target.exists():
            write_whole(target.with_name(target.name + ".before"), target.read_bytes())
            with contextlib.suppress(GdntuneError):  # measured otherwise: it stands beside
                own = merge(own, table.load(target), "first")
        table.save(own, target)
    except OSError as e:
        raise ToolMissing(f"{target}: not written: {e.strerror or e}; set XDG_DATA_HOME") from None
    return target
