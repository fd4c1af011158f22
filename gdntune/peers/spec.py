"""What a peer has: other people's kernels as entries that say what they serve and how they are
called. Imports none of them.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
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

Kind = Literal["rule", "layer", "ring"]
_KINDS = {
    "rule": "gates and delta rule alone",
    "layer": "more than gates and delta rule",
    "ring": "a ring of corrections",
}


@dataclasses.dataclass(frozen=True)
class Function:
    """Where a peer has a function, and the arguments that its adapter names: what may differ in
    another version.
    """

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    def load(self) -> Any:
        """The function; ToolMissing says why there is none."""
        return imported(self.module, self.name)

    def moved(self) -> str | None:
        """What of this the installed sources lack; None where all is there. Imports nothing."""
        node = _definition(self.module, self.name)
        if isinstance(node, str):
            return node
        if not isinstance(node, ast.FunctionDef):
            return None
        # Keyword arguments of any name say nothing of those that are used.
        names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        lacking = [] if node.args.kwarg else [x for x in self.arguments if x not in names]
        return f"{self.module}.{self.name} has no argument {listed(lacking)}" if lacking else None


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call of a peer with its arguments made; what is timed is `call` alone.

    call: returns what the library returns. output: of that, the B*T output rows [HV, V] in the
    case's order. state: of that, the tensor with the final states, in the contract's layout; None
    where none is written. rows [B]: which of its rows are the requests', None: row n is request
    n's. intermediate: of what is returned, the states after each token [B, T or more, ...]; None:
    they lie where the case has them. cycle: calls until what a call does comes again; a sample is
    the mean of so many that follow one another. steps: the calls of a full cycle, each by itself,
    for layers of which each is at a step of its own. epilogue(output [n, T, HV, V], requests [n]):
    what the call makes of the contract's output of some requests, in fp64; None: nothing.
    left: what stands where the call leaves something besides, and what must, exactly [B, ...].
    """

    call: Callable[[], Any]
    output: Callable[[Any], Tensor]
    state: Callable[[Any], Tensor] | None = None
    rows: Tensor | None = None
    intermediate: Callable[[Any], Tensor] | None = None
    cycle: int = 1
    steps: tuple[Callable[[], Any], ...] = ()
    epilogue: Callable[[Tensor, Tensor], Tensor] | None = None
    left: Callable[[], tuple[Tensor, Tensor]] | None = None

    def at_layer(self, layer: int) -> Callable[[], Any]:
        """The call that one of several layers makes, whose steps are spread over the cycle."""
        return self.steps[layer % len(self.steps)] if self.steps else self.call


def _nothing(problem: Problem) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One function of a peer.

    refuse: why it does not serve a problem, or None. bind: makes the arguments for a case, by views
    where it can; what it must convert or copy it does here, once. May raise UnsupportedProblem for
    a case that the function cannot take. form: how it is called, for reports. extra_bytes: what it
    moves beyond `sol.bytes_moved`. tolerance: relative error that its own roundings may bring,
    where that is more than the dtypes' (see `compare`). functions: what it calls of the library.
    packed: whether it reads q, k and v from one tensor, see `mixed_qkv`. follows_ours: its call
    takes our output, so that it is timed behind our choice: a partner of entries that do more than
    the contract. partner: the name of that entry, against which this one is judged. kind: of
    which contracts it serves some, the delta rule's alone, a layer's with a convolution or a norm,
    or those with a ring of corrections. several: it launches several
    kernels, which are replayed from a CUDA graph, as an engine would: launched one by one, its time
    would have the host's between them.
    """

    name: str
    refuse: Callable[[Problem], str | None]
    bind: Callable[[Case], Bound]
    form: str
    extra_bytes: Callable[[Problem], int] = _nothing
    tolerance: float = 0.0
    functions: tuple[Function, ...] = ()
    packed: bool = False
    follows_ours: bool = False
    partner: str = ""
    kind: Kind = "rule"
    several: bool = False


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library. packages: what must be there to import. distributions: the names that its version
    may be installed under. written_for: the version that the adapter was written for. cache: the
    environment variable that names the folder of its compiled kernels, where a process locks that
    folder while it compiles.
    """

    name: str
    packages: tuple[str, ...]
    distributions: tuple[str, ...]
    remedy: str
    entries: tuple[Entry, ...]
    device: Literal["cuda", "cpu"] = "cuda"
    written_for: str = ""
    cache: str = ""

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
        # Found, not imported: a peer's import compiles, warns, or takes a CUDA context.
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not installed: {self.remedy} (no package {listed(lacking)})" if lacking else None

    def differs(self) -> list[str]:
        """In what the installed library is not the one that the adapter was written for: its
        version, and what its sources lack of what is called. Imports nothing; empty where it is
        not installed.
        """
        if self.absent():
            return []
        found = []
        if self.written_for and self.version() != self.written_for:
            found.append(f"written for {self.written_for}, {self.version()} is installed")
        for entry in self.entries:
            moved = [fault for function in entry.functions if (fault := function.moved())]
            found += [f"{entry.name}: {fault}" for fault in moved]
        return found

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
        c = problem.contract
        kind: Kind = "ring" if c.ring else "layer" if c.layer else "rule"
        # none has a norm behind a ring
        entries = [e for e in self.entries if e.kind == kind and not (c.ring and c.layer)]
        if not entries:
            return (
                [],
                f"norm={c.norm}, conv={c.conv}, ring={c.ring}: no entry serves {_KINDS[kind]}",
            )
        faults = {entry.name: entry.refuse(problem) for entry in entries}
        found = [entry for entry in entries if faults[entry.name] is None]
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
        # In the variant's knobs, so that a journal says what was timed and how.
        knobs: dict[str, int | str | bool] = {"version": self.version(), "form": entry.form}
        if extra := entry.extra_bytes(problem):
            knobs["extra_bytes"] = extra
        if entry.partner:
            knobs["partner"] = f"{kernel}.{entry.partner}"
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


def _definition(module: str, name: str) -> ast.AST | str:
    """What defines a module's name in the installed sources, or why it is not found there."""
    path = _source(module)
    if path is None:
        return f"there is no {module}"
    for node in _top_level(_parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    # Followed to where it is defined: packages hand functions on from their own
                    # __init__.
                    return _definition(_absolute(module, path, node), alias.name)
        # A constant is what stands in where the import before it fails.
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
            targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if name in targets:
                return node
    return f"{module} has no {name}"


def _source(module: str) -> Path | None:
    """The file of a module, found without importing its packages."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest and spec.origin:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        at = Path(folder, *rest)
        for path in (at.with_name(f"{at.name}.py"), at / "__init__.py"):
            if path.is_file():
                return path
    return None


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, those under `try` and `if` too."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.Try, ast.If, ast.ExceptHandler)):
            yield from _top_level(node)


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


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


def mixed_qkv(case: Case) -> Tensor:
    """q, k and v packed in rows [B*T, 2*H*K + HV*V], as a convolution leaves them: the case's own
    where something keeps it up to date, else a copy made now.
    """
    if case.mixed is not None:
        return case.mixed
    rows = [packed(case, x)[0].flatten(1) for x in (case.q, case.k, case.v)]
    return torch.cat(rows, dim=1)


def dense_steps(case: Case) -> Tensor | None:
    """The case's buffer of intermediate states, for libraries that take none with gaps; where it
    has some, one of its own without.
    """
    found = case.intermediate
    if found is None or found.is_contiguous():
        return found
    return torch.full(found.shape, torch.nan, dtype=found.dtype, device=found.device)


def dense_pool(case: Case) -> Tensor:
    """The case's states, for libraries that would copy a pool with gaps at each call, or refuse it:
    a copy made now where it has some. Only for contracts that keep the states as they are.
    """
    return case.state.contiguous()
