"""The runtime: finds a table's row for a contract, loads the function once, hands it out.

Tables are looked for in this order: `load_table(path)` or GDNTUNE_TABLE; the user's; the shipped
one of this device; the shipped one of the nearest device, with a warning; else each kernel's own
default rule. Nothing is decided twice: a contract is bound once.
"""

import bisect
import hashlib
import logging
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import gdntune
from gdntune import kernels
from gdntune.device.arch import Device, detect
from gdntune.errors import CaptureError, UnsupportedProblem
from gdntune.kernels.dependent_launch import form, tried
from gdntune.kernels.spec import Variant
from gdntune.objects.store import NOWHERE, ObjectSpec, Store, installed_bundle, object_spec
from gdntune.problem import Contract, Op, check_contract
from gdntune.results import table
from gdntune.runtime import environment

log = logging.getLogger("gdntune")

Function = Callable[..., Any]


class Source(NamedTuple):
    """A table in use and where it came from."""

    table: table.Table
    path: Path
    why: str


class Choice(NamedTuple):
    """What serves some work units, from `first` on: the variant, and the source of the choice.

    weighed: whether it was chosen among forms with dependent launch too, so that one that has none
        stays without.
    """

    first: int
    variant: Variant
    why: str
    weighed: bool = False


def user_tables() -> Path:
    """Where a user's own tables are looked for: <here>/<device>/<op>.json. A user without a home
    has none.
    """
    import platformdirs

    try:
        return Path(platformdirs.user_data_dir("gdntune")) / "tables"
    except (RuntimeError, KeyError):
        return NOWHERE / "tables"


def shipped_tables() -> Path:
    """The tables that come with gdntune."""
    inside = Path(__file__).parent.parent / "tables"
    return inside if inside.exists() else Path(__file__).parent.parent.parent / "tables"


@cache
def warn_once(message: str) -> None:
    """A warning that a server's log should hold once, not at each step."""
    log.warning(message)


@cache
def _log_as_asked() -> None:
    """Prints the log to stderr from the level that GDNTUNE_LOG names."""
    level = environment.log_level()
    if not level:
        return
    if level not in ("debug", "info", "warning", "error"):
        raise UnsupportedProblem(
            f"GDNTUNE_LOG={level!r}: expected one of debug, info, warning, error"
        )
    # On gdntune's own logger: the application's handlers stay as they are.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())


def _bundles(device: Device) -> list[Path]:
    """Where compiled objects come from: what GDNTUNE_BUNDLE names, then an installed package."""
    installed = installed_bundle(device.arch)
    return [*environment.bundles(), *([installed] if installed else [])]


class Runtime:
    """The tables, objects and bound functions of one device in this process.

    device: what runs; store: where compiled objects are. Neither is closed; a process keeps one
    runtime a device.
    """

    def __init__(self, device: Device, store: Store | None = None):
        self.device = device
        _log_as_asked()
        self.store = store or Store(bundles=_bundles(device))
        self._sources: dict[str, Source | None] = {}
        self._bound: dict[tuple[Contract, bool, bool | None], Bound] = {}

    def use(self, path: str | os.PathLike[str]) -> table.Table:
        """Makes a table the one in use for the ops it has rules for. UnsupportedProblem for one of
        another kind of device.
        """
        loaded = self._given(path)
        for op in {rule.when.op for rule in loaded.rules}:
            self._sources[op] = self._checked(Source(loaded, Path(path), "given"))
        self._bound.clear()
        return loaded

    def forget(self) -> None:
        """Drops tables and bound functions, so that they are looked up anew."""
        self._sources.clear()
        self._bound.clear()

    def source(self, op: Op) -> Source | None:
        """The table in use for an op, or None where only default rules speak."""
        if op not in self._sources:
            found = self._find(op)
            self._sources[op] = self._checked(found) if found else None
            if found:
                log.info("%s: table %s (%s)", op, found.path, found.why)
            else:
                log.info("%s: no table for %s, default rules", op, self.device.name)
        return self._sources[op]

    def table_hash(self) -> str:
        """16 hex digits of the tables in use, and of the default rules' version."""
        parts = [gdntune.__version__, self.device.arch]
        for op in get_args(Op):
            source = self.source(op)
            parts.append(hashlib.sha256(source.path.read_bytes()).hexdigest() if source else "")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _given(self, path: str | os.PathLike[str]) -> table.Table:
        loaded = table.load(path)
        if loaded.device.kind != self.device.kind:
            raise UnsupportedProblem(
                f"{path} was measured on {loaded.device.name}, of kind {loaded.device.kind}:"
                f" expected on {self.device.name} a table of kind {self.device.kind}; `gdntune"
                " sweep` makes one"
            )
        return loaded

    def _find(self, op: Op) -> Source | None:
        if given := environment.given_table():
            loaded = self._given(given)
            if any(rule.when.op == op for rule in loaded.rules):
                return Source(loaded, Path(given), "GDNTUNE_TABLE")
        own = f"{self.device.slug}/{op}.json"
        for folder, why in ((user_tables(), "the user's"), (shipped_tables(), "shipped")):
            # os.path.exists is False where one may not look; Path.exists raises.
            if os.path.exists(folder / own):
                return Source(table.load(folder / own), folder / own, why)
        return self._nearest(op)

    def _nearest(self, op: Op) -> Source | None:
        """The shipped table of the device most like this one, by SMs and DRAM peak."""
        there = sorted(shipped_tables().glob(f"*/{op}.json"))
        # Of each table its device alone, which takes a tenth of the time of the whole.
        others = [(p, d) for p in there if (d := table.device_of(p)).kind == self.device.kind]
        if not others:
            return None

        def distance(d: Device) -> float:
            # Ratios of both, added: a GPU with twice the SMs and half the bandwidth is no near one.
            apart = abs(math.log(d.sm_count / self.device.sm_count))
            if d.peak_gb_s and self.device.peak_gb_s:
                apart += abs(math.log(d.peak_gb_s / self.device.peak_gb_s))
            return apart

        path, _ = min(others, key=lambda other: distance(other[1]))
        best = Source(table.load(path), path, "nearest")
        warn_once(
            f"no table for {self.device.name}: using that of {best.table.device.name}, the nearest"
            " by SMs and bandwidth; `gdntune sweep` makes one for this device"
        )
        return best

    def _checked(self, source: Source) -> Source:
        kernels.check_names(map(source.table.variant, source.table.variants), str(source.path))
        names = table.stale(source.table, kernels.fingerprints(self.device.kind))
        if names:
            warn_once(
                f"{source.path} is stale: it was measured with another version of"
                f" {', '.join(names)}; its choices are used, they may no longer be the fastest;"
                " sweep again"
            )
        return source

    def choices(self, contract: Contract, dependent_launch: bool | None = None) -> list[Choice]:
        """What serves a contract, by rising work units; the first starts at 1. dependent_launch:
        whether the caller allows it; None: as each variant was chosen.
        """
        found = self._chosen(check_contract(contract), dependent_launch is not False)
        if dependent_launch is None:
            return found
        return [launched(contract, c, dependent_launch) for c in found]

    def _chosen(self, contract: Contract, dependent_launch: bool) -> list[Choice]:
        found: list[Choice] = []
        source = self.source(contract.op)
        if source is not None:
            found = self._from_table(source, contract, dependent_launch)
            if not found and contract.conv_input != "packed":
                # the same bytes from other places: what is fast for the one is for the other
                packed = contract.replace(conv_input="packed")
                found = self._from_table(source, packed, dependent_launch)
        if found:
            return found
        # The default rule, sampled at powers of two: it is a staircase of a few steps
        for exponent in range(20):
            variant = kernels.default(contract, 1 << exponent, self.device)
            if not found or found[-1].variant != variant:
                found.append(Choice(1 << exponent, variant, "the kernel's default rule"))
        return found

    def _from_table(
        self, source: Source, contract: Contract, dependent_launch: bool
    ) -> list[Choice]:
        # Nearest first; a rule with any variant that cannot serve the contract is passed over
        # whole.
        for rule in source.table.ranked(contract):
            why = f"{source.why} table {source.path}, rule {rule.when.key()}"
            if not dependent_launch and rule.alone:
                why += ", its choice for calls without dependent launch"
            found = [
                Choice(i.first, v, why, tried(v.knobs, source.table.policy_of(rule)))
                for i in rule.serving(dependent_launch)
                for v in (source.table.variant(i.variant),)
            ]
            faults = [
                f"{c.variant.id}: {fault}"
                for c in found
                if (fault := _unusable(contract, c.variant, self.device))
            ]
            if not faults and source.table.device.arch != self.device.arch:
                return [
                    c._replace(variant=kernels.elsewhere(contract, c.variant, self.device))
                    for c in found
                ]
            if not faults:
                return found
            warn_once(
                f"{source.path}: rule {rule.when.key()} cannot serve {contract.key()}: {faults[0]};"
                " the next nearest is tried"
            )
        return []

    def bind(
        self,
        contract: Contract,
        *,
        batch_invariant: bool = False,
        dependent_launch: bool | None = None,
    ) -> "Bound":
        """The functions that serve a contract, bound once. dependent_launch: whether the caller
        allows it; None: as each variant was chosen.
        """
        key = (contract, batch_invariant, dependent_launch)
        bound = self._bound.get(key)
        if bound is None:
            choices = self.choices(contract, dependent_launch)
            if batch_invariant:
                choices = [
                    # The variant of the largest sizes serves all: there a wrong choice costs the
                    # most time.
                    choices[-1]._replace(
                        first=1,
                        why=choices[-1].why + "; batch_invariant: one variant for all sizes",
                    )
                ]
            bound = self._bound[key] = Bound(self, contract, choices)
        return bound

    def spec(self, contract: Contract, variant: Variant) -> ObjectSpec:
        """The object that serves a contract with a variant here."""
        return object_spec(kernels.get(variant.kernel), contract, variant, self.device)

    def functions(self, contract: Contract, variants: list[Variant]) -> list[Function]:
        """The loaded functions of variants, compiled first where the store lacks them."""
        pairs = [(self.spec(contract, v), kernels.get(v.kernel).compiler) for v in variants]
        missing = [p for p in pairs if self.store.find(p[0]) is None]
        if missing:
            from gdntune.runtime.compiling import compile_missing

            compile_missing(missing, self.store, contract)
        loaded = self.store.load([spec for spec, _ in pairs])
        return [loaded[spec.key] for spec, _ in pairs]


def launched(contract: Contract, choice: Choice, dependent: bool) -> Choice:
    """A choice as a caller allows it to start: without dependent launch, or with the form that a
    table chose. Where it chose none among such forms, the choice stays as it is; where none was
    tried, it gets `first`, which owes least. A kernel without the knob, or a setting that has no
    such form, stays as it is too.
    """
    kernel = kernels.get(choice.variant.kernel)
    # with its defaults: a table may be older than the knob
    setting = kernel.setting(choice.variant.knobs)
    allowed = form(setting, dependent)
    if allowed == setting:
        return choice
    if dependent and choice.weighed:
        return choice._replace(
            why=f"{choice.why}; without dependent launch, as it was chosen in a chain, where that"
            " was tried too"
        )
    other = kernel.variant(allowed)
    if dependent and kernels.refuse(contract, other) is not None:
        return choice
    said = "with" if dependent else "without"
    return choice._replace(
        variant=other,
        why=f"{choice.why}; the choice is {choice.variant.id}, called in its form {said} dependent"
        " launch",
    )


def _unusable(contract: Contract, variant: Variant, device: Device) -> str | None:
    if variant.kernel not in kernels.KERNELS:
        return f"this version has no kernel {variant.kernel!r}"
    if kernels.get(variant.kernel).device != device.kind:
        return (
            f"kernel {variant.kernel} runs on {kernels.get(variant.kernel).device}, not on"
            f" {device.kind}"
        )
    try:
        return kernels.refuse(contract, variant)
    except LookupError as e:
        return str(e)


class Bound:
    """A contract's choices with their functions; `at(work_units)` is the hot path."""

    def __init__(self, runtime: Runtime, contract: Contract, choices: list[Choice]):
        self.runtime, self.contract, self.choices = runtime, contract, choices
        self._starts = [c.first for c in choices]
        self._functions: list[Function | None] = [None] * len(choices)

    def choice(self, work_units: int) -> Choice:
        return self.choices[bisect.bisect_right(self._starts, work_units) - 1]

    def at(self, work_units: int) -> Function:
        """The function for these work units, at least 1."""
        i = bisect.bisect_right(self._starts, work_units) - 1
        function = self._functions[i]
        return function if function is not None else self._load(i)

    def __repr__(self) -> str:
        chosen = ", ".join(f"from {c.first}: {c.variant.id}" for c in self.choices)
        return f"Bound({self.contract.key()}, {chosen})"

    def _load(self, i: int) -> Function:
        if capturing(self.runtime.device.kind):
            raise CaptureError(
                f"{self.contract.key()} under CUDA graph capture: its function"
                f" {self.choices[i].variant.id} is not loaded, and loading cannot be captured; call"
                f" gdntune.prepare with this contract before: {self.contract!r}"
            )
        function = self.runtime.functions(self.contract, [self.choices[i].variant])[0]
        # The same variant may serve several intervals
        for j, c in enumerate(self.choices):
            if c.variant == self.choices[i].variant:
                self._functions[j] = function
        return function

    def load_all(self) -> None:
        """Loads every function a rule can choose, so that any batch can be captured in a CUDA graph
        afterwards.
        """
        functions = self.runtime.functions(self.contract, [c.variant for c in self.choices])
        self._functions = list(functions)


def capturing(kind: str) -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    if kind != "cuda":
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


@cache
def runtime(kind: str, index: int = 0) -> Runtime:
    """This process's runtime of a device: `cuda` and its index, or `cpu`."""
    if kind not in ("cuda", "cpu"):
        raise UnsupportedProblem(f"tensors are on {kind}: expected cuda or cpu")
    return Runtime(detect(kind, index))  # type: ignore[arg-type]
