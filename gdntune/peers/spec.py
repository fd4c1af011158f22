"""What a peer has: other people's kernels as entries that say what they serve and how they are
called. Imports none of them.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import ToolMissing, UnknownName, UnsupportedProblem, listed
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem

# Several peers address states by signed 32-bit offsets: from so many elements on they read and
# write elsewhere.
REACH = 2**31


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call of a peer with its arguments made; what is timed is `call` alone.

    call: returns what the library returns. output: of that, the B*T output rows [HV, V] in the
        case's order. state: of that, the
    tensor with the final states, in the contract's layout; None where none is written. rows [B]:
    which of its rows are the requests',
    None: row n is request n's. intermediate: of what is returned, the states after each token [B, T
        or more, ...]; None: they lie
    where the case has them. cycle: calls until what a call does comes again; a sample is the mean
    of so many that follow one another.
    """

    call: Callable[[], Any]
    output: Callable[[Any], Tensor]
    state: Callable[[Any], Tensor] | None = None
    rows: Tensor | None = None
    intermediate: Callable[[Any], Tensor] | None = None
    cycle: int = 1


def _nothing(problem: Problem) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One function of a peer.

    refuse: why it does not serve a problem, or None. bind: makes the arguments for a case, by views
        where it can; what it must convert
    or copy it does here, once. May raise UnsupportedProblem for a case that the function cannot
    take. form: how it is called, for reports.
    extra_bytes: what it moves beyond `sol.bytes_moved`. tolerance: relative error that its own
        roundings may bring, where that is
    more than the dtypes' (see `compare`).
    """

    name: str
    refuse: Callable[[Problem], str | None]
    bind: Callable[[Case], Bound]
    form: str
    extra_bytes: Callable[[Problem], int] = _nothing
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library. packages: what must be there to import. distributions: the names that its version
    may be installed under.
    """

    name: str
    packages: tuple[str, ...]
    distributions: tuple[str, ...]
    remedy: str
    entries: tuple[Entry, ...]
    device: Literal["cuda", "cpu"] = "cuda"

    def version(self) -> str:
        """Its version without importing it, `unknown` where no distribution says."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    def absent(self) -> str | None:
        """Why it cannot be imported, and what to do; None where its packages are there. Imports
        nothing.
        """
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not installed: {self.remedy} (no package {listed(lacking)})" if lacking else None

    def entry(self, name: str) -> Entry:
        """The entry of a name; UnknownName lists those that are."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownName(
            f"{self.name} has no entry {name!r}: it has {listed(e.name for e in self.entries)}"
        )

    def serving(self, problem: Problem) -> tuple[list[Entry], str]:
        """The entries that serve a problem; where there are none, why."""
        faults = {entry.name: entry.refuse(problem) for entry in self.entries}
        found = [entry for entry in self.entries if faults[entry.name] is None]
        reasons: dict[str, list[str]] = {}
        for name, fault in faults.items():
            reasons.setdefault(fault or "", []).append(name)
        # That another op's functions do not serve this one goes without saying, where there are
        # others.
        other_op = f"op={problem.contract.op}"
        telling = {
            fault: names for fault, names in reasons.items() if not fault.startswith(other_op)
        } or reasons
        return found, "; ".join(
            f"{listed(names)}: {fault}" for fault, names in telling.items() if fault
        )

    def variant(self, entry: Entry | None = None, problem: Problem | None = None) -> Variant:
        """What a trial of it is recorded as: of an entry, or of the whole peer."""
        kernel = f"peer:{self.name}"
        if entry is None or problem is None:
            return Variant(kernel, kernel, {"version": self.version()})
        knobs: dict[str, int | str | bool] = {"version": self.version(), "form": entry.form}
        if extra := entry.extra_bytes(problem):
            knobs["extra_bytes"] = extra
        return Variant(kernel, f"{kernel}.{entry.name}", knobs)


def imported(module: str, name: str) -> Any:
    """A function of a peer; ToolMissing says why there is none."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as e:
        raise ToolMissing(
            f"{module} cannot be imported ({type(e).__name__}: {e}); install what it lacks, or"
            " leave this peer out"
        ) from e
    if found is None:
        raise ToolMissing(
            f"{module} has no {name}: its requirements are not met here, or this version has"
            " another name"
        )
    return found


def unless(contract: Contract, **accepted: tuple[Any, ...]) -> str | None:
    """Why a contract is not served, given the accepted values of its fields; None where all are."""
    for name, values in accepted.items():
        if getattr(contract, name) not in values:
            return f"{name}={getattr(contract, name)}, expected {' or '.join(map(str, values))}"
    return None


def beyond_reach(elements: int, what: str) -> str | None:
    """Why a tensor is too large for 32-bit offsets; None where it is not."""
    return (
        f"{what} has {elements} elements, its 32-bit offsets end below {REACH}"
        if elements >= REACH
        else None
    )


def intermediate_elements(problem: Problem) -> int:
    """The elements of a dense buffer of intermediate states: [B, T, HV, K*V]; 0 without one."""
    c = problem.contract
    return 0 if c.intermediate == "none" else problem.B * c.tokens * problem.HV * c.K * c.V


def slots_of(case: Case) -> Tensor:
    """The slot of each request, int32 [B], for libraries that read and write one slot: those of the
    pool, else 0..B-1.

    Raises UnsupportedProblem where the case reads from one slot and writes to another.
    """
    read, write = case.read_index, case.write_index
    if read is None:
        return torch.arange(case.problem.B, dtype=torch.int32, device=case.q.device)
    if write is not None and not torch.equal(read, write):
        raise UnsupportedProblem(
            "read_index differs from write_index: this call knows one slot a request; pass equal"
            " ones"
        )
    return read


def packed(case: Case, x: Tensor) -> Tensor:
    """x [B, T, ...] as packed rows [1, B*T, ...], without a copy."""
    return x if case.contract.ragged else x.view(1, -1, *x.shape[2:])


def starts(case: Case) -> Tensor:
    """cu_seqlens [B+1] int32 of packed rows: the case's own, else every T."""
    if case.cu_seqlens is not None:
        return case.cu_seqlens
    tokens = case.contract.tokens
    return torch.arange(
        0, case.problem.B * tokens + 1, tokens, dtype=torch.int32, device=case.q.device
    )
