"""What a journal's lines are, and what is asked of them: which cells have times, which of them were
taken at the power limit or cannot be believed.
"""

import contextlib
import gc
import hashlib
import itertools
import lzma
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, final

import filelock
import msgspec

from gdntune import __version__, strict
from gdntune.device.arch import Card, Device
from gdntune.errors import JournalError, Locked, counted, listed, no_folder
from gdntune.files import write_whole
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem, without_defaults
from gdntune.results.workload import Load


# How the reason of a cell begins that has times which cannot be believed.
NOISY = "noisy: "

Status = Literal["ok", "failed"]


Purpose = Literal["bisection", "held-out", "evidence"]


Ended = Literal["ok", "failed", "crashed", "timeout"]
# How the names of a bench's `software` begin where they say whose choices it times, for which
# calls where these are not as the table chose, and beside whom.
TABLE, LAUNCH, PEER = "table for ", "dependent launch", "peer "


class _Record(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower
):
    """Tagged by `kind`, the class's name in small letters."""


def policy_words(policy: Mapping[str, str]) -> str:
    """A timing policy, as a sentence names it."""
    return ", ".join(f"{k} {v}" for k, v in sorted(policy.items()))


class Run(_Record, frozen=True, kw_only=True):
    """The header, a journal's first line: everything that a later reader needs to judge the
    samples.

    config: its name. software: versions by name. policy: `timer` and `l2` as resolved. kernels:
        fingerprints by kernel.
    peaks: the DRAM's peak, GB/s, by source (`datasheet`, `nvml`, `measured`). started: ISO 8601,
        UTC.
    workload: the steps that the cells' rounds were weighed by, absent where there was none.
    regret, keeps_default, alone: how its table is derived, see `derive.derive`; absent where an
        older version wrote.
    cells: how many its config asks for, without those that a sweep adds. rounds, placements: its
        config's; one placement where it is absent. workers_per_device: processes that took turns on
        one when it began, one where it is absent. Absent as these are. cards: the GPUs of this host that timed, as they were
        when it began.
    """

    schema: Literal["gdntune.journal/1"] = "gdntune.journal/1"
    config: str
    config_sha256: str
    device: Device
    software: dict[str, str]
    policy: dict[str, str]
    kernels: dict[str, str]
    peaks: dict[str, float] = {}
    started: str
    command: str = ""
    workload: tuple[Load, ...] | msgspec.UnsetType = msgspec.UNSET
    regret: float | msgspec.UnsetType = msgspec.UNSET
    keeps_default: bool | msgspec.UnsetType = msgspec.UNSET
    alone: bool | msgspec.UnsetType = msgspec.UNSET
    cells: int | msgspec.UnsetType = msgspec.UNSET
    rounds: int | msgspec.UnsetType = msgspec.UNSET
    placements: int | msgspec.UnsetType = msgspec.UNSET
    workers_per_device: int | msgspec.UnsetType = msgspec.UNSET
    cards: tuple[Card, ...] | msgspec.UnsetType = msgspec.UNSET


class Build(_Record, frozen=True, kw_only=True):
    """One compile. object_key: the store's key. registers, spill_bytes and shared_bytes: None where
    the compiler does not say.
    """

    kernel: str
    variant: str
    object_key: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    cached: bool = False


class Check(_Record, frozen=True, kw_only=True):
    """One variant against the fp64 reference. error: the worst relative error, None where nothing
    could be compared.
    """

    contract: Contract
    variant: str
    status: Ended
    reason: str = ""
    error: float | None = None
    seconds: float = 0.0


class Trial(_Record, frozen=True, kw_only=True):
    """One attempt at timing a variant at a cell. samples_us: one a round, kept to the nanosecond.

    `screen` is the quick first look at all variants, `final` the paired re-run of the best few on
    fresh samples. `evidence` is taken after the choice, on tensors of its own: it says what the
    choice takes, and has no part in it. role: `partner` is our choice with what a peer's call does beyond the contract,
    which that peer is judged against. kernels: the names of what one call of a peer launches, in
    order, where the timer can tell.
    """

    problem: Problem
    variant: Variant
    role: Literal["decode", "floor", "peer", "partner"] = "decode"
    stage: Literal["screen", "final", "evidence"]
    status: Ended
    reason: str = ""
    samples_us: list[float] = []
    seconds: float = 0.0
    kernels: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def to_the_end(self) -> bool:
        """Whether it is more than a first look."""
        return self.stage != "screen"


class Cell(_Record, frozen=True, kw_only=True):
    """Closes a pass over a cell: the trials of this problem since its last Cell belong together; a
    failed one voids them.

    stop: which condition ended it. clocks_before, clocks_after: as read by NVML, empty where there
        is none.
    default_variant: what the kernel's default rule chose here when it was timed; absent where it
        chose none, or an older version wrote.
    choice: the variant that was chosen beforehand, of a bench: others that were timed beside it are
        not chosen among.
    purpose: why it was timed where it is no cell of the config: `bisection` of a crossover, or
        `held-out`, which has no part in choosing; `evidence`: again, once its choice was made.
    interval: half the width of the widest 95% interval of a ratio to the choice, where rounds went
        on until it was narrow.
    timed_on: the device, where several shared the sweep.
    """

    problem: Problem
    status: Status
    reason: str = ""
    stop: str = ""
    seconds: float = 0.0
    clocks_before: dict[str, Any] = {}
    clocks_after: dict[str, Any] = {}
    default_variant: str | msgspec.UnsetType = msgspec.UNSET
    choice: str | msgspec.UnsetType = msgspec.UNSET
    purpose: Purpose | msgspec.UnsetType = msgspec.UNSET
    timed_on: str | msgspec.UnsetType = msgspec.UNSET
    interval: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def chooses(self) -> bool:
        """Whether its samples are those that a table is made of."""
        return self.purpose != "evidence"

    @property
    def power_capped(self) -> bool:
        """Whether the device was at its power limit before or after."""
        seen = (self.clocks_before, self.clocks_after)
        return any("sw_power_cap" in x.get("event_reasons", ()) for x in seen)


Record = Build | Check | Trial | Cell


def contract_of(record: Record) -> Contract | None:
    """The contract that a record is about; None of a build, which serves several."""
    if isinstance(record, Check):
        return record.contract
    return None if isinstance(record, Build) else record.problem.contract


def made_by(run: Run) -> Literal["sweep", "bench"]:
    """The command that wrote a journal: a bench names whose choices it times."""
    return "bench" if any(name.startswith(TABLE) for name in run.software) else "sweep"


def timed(records: Iterable[Record]) -> set[Problem]:
    """The problems of cells that have times. What failed is tried again when its sweep goes on."""
    return {r.problem for r in records if isinstance(r, Cell) and r.chooses and r.status == "ok"}


def tried(records: Iterable[Record]) -> set[Problem]:
    """The problems of cells that were closed, with times or as failed."""
    return {r.problem for r in records if isinstance(r, Cell) and r.chooses}


def power_capped(records: Iterable[Record]) -> set[Problem]:
    """The problems whose last times were taken at the device's power limit."""
    last = {r.problem: r for r in records if isinstance(r, Cell) and r.status == "ok"}
    return {problem for problem, r in last.items() if r.power_capped}


def noisy(records: Iterable[Record]) -> list["Cell"]:
    """The cells whose times cannot be believed, by the last pass that has times: a later one that
    failed leaves these.
    """
    last = {(r.problem, r.chooses): r for r in records if isinstance(r, Cell) and r.status == "ok"}
    return [r for r in last.values() if r.reason.startswith(NOISY)]


def noise_notes(records: Iterable[Record], whose: str = "") -> list[str]:
    """A line of the cells whose times cannot be believed, with the first's reason; none where all
    can. whose: in words, where several journals are read.
    """
    found = {cell.problem: cell.reason.removeprefix(NOISY) for cell in noisy(records)}
    if not found:
        return []
    problem, reason = next(iter(found.items()))
    verb, their = ("is", "its") if len(found) == 1 else ("are", "their")
    return [
        f"{counted(len(found), 'cell')}{whose} {verb} noisy: {their} times cannot be believed; the first:"
        f" {problem.key()}, {reason}"
    ]


def latest(records: Iterable[Record]) -> list[Record]:
    """The records without those that a later one of the same object, check or cell replaces; a
    failed trial stays, whatever others do.
    """
    last: dict[object, Record] = {}
    for record in records:
        last[_subject(record)] = record
    return list(last.values())


def _subject(record: Record) -> object:
    if isinstance(record, Build):
        return record.object_key
    if isinstance(record, Check):
        return record.contract, record.variant
    return (record.problem, record.chooses) if isinstance(record, Cell) else id(record)
