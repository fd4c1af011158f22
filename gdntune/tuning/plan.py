"""What a run compiles, checks and times, decided before anything runs. Knows no kernel by name.

A sweep tries every variant of its config and chooses. A bench chooses nothing: it times a choice
made beforehand, the default rule's, the floors and other libraries' entries. `run` runs both.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gdntune import kernels
from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects.store import ObjectSpec, object_spec
from gdntune.problem import Contract, Problem
from gdntune.results.records import LAUNCH, PEER, TABLE
from gdntune.results.table import Table
from gdntune.timing import L2
from gdntune.tuning import cells
from gdntune.tuning.config import Config, Search

if TYPE_CHECKING:
    from gdntune.peers.spec import Peer
    from gdntune.runtime.dispatch import Runtime

# The ids of the variants that have final samples at a problem, whatever their first samples say.
Choices = Callable[[Problem], frozenset[str]]


class Usable(msgspec.Struct, frozen=True):
    """Which variants of a plan may be timed, as far as is known: each step of a run takes it and
    gives the next.

    tried, floors: by contract, what is timed at each of its cells. sound: what compiled without
    spilling, then what passed its check too, by contract and id; what is named at single cells, as
    the default rule's choice is, stands here alone.
    """

    tried: Mapping[Contract, tuple[Variant, ...]]
    floors: Mapping[Contract, tuple[Variant, ...]]
    sound: frozenset[tuple[Contract, str]]

    def checked(self, passed: Iterable[tuple[Contract, str]]) -> "Usable":
        """Without the decode variants that did not pass their check."""
        # The floors are not checked: nothing of what they write is used.
        sound = self.sound & frozenset(passed)
        tried = {
            contract: tuple(v for v in variants if (contract, v.id) in sound)
            for contract, variants in self.tried.items()
        }
        return msgspec.structs.replace(self, tried=tried, sound=sound)

    def without(self, contract: Contract, broken: Iterable[str]) -> "Usable":
        """Without the variants that took a process down at one of a contract's cells: the others
        are not risked for them. What is named at a cell is still tried there.
        """
        out = frozenset(broken)
        kept = tuple(v for v in self.tried[contract] if v.id not in out)
        return msgspec.structs.replace(self, tried={**self.tried, contract: kept})


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run's plan. Made by `sweep_plan` or `bench_plan`.

    problems: the cells, in order. tried, floors: of each contract the decode variants and floors
    that are timed at all of its cells. choices: of a bench, what is chosen at each cell beforehand;
    None: the run chooses, and may add cells. judged: tables whose choices get final samples.
    peers: other libraries by name. origins: what else two runs that share a journal have in common.
    l2: the L2 policy that all is timed under.
    """

    config: Config
    device: Device
    problems: tuple[Problem, ...]
    tried: Mapping[Contract, tuple[Variant, ...]]
    floors: Mapping[Contract, tuple[Variant, ...]]
    choices: Mapping[Problem, Variant] | None = None
    judged: tuple[Table, ...] = ()
    peers: Mapping[str, "Peer"] = dataclasses.field(default_factory=dict)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    l2: L2 = "cold-clean"

    @property
    def regret(self) -> float | None:
        """How much a choice may lose for a simpler table; None: nothing is chosen."""
        return None if self.choices is not None else self.config.search.regret

    def header_fields(self) -> dict[str, Any]:
        """What a journal's header says of how its table is derived."""
        if self.regret is None:
            return {}
        return {"regret": self.regret, "keeps_default": True, "alone": True}

    def default(self, problem: Problem) -> Variant:
        """The default rule's choice at a cell."""
        return kernels.default(problem.contract, problem.work_units, self.device)

    def named(self, problem: Problem) -> list[Variant]:
        """What is timed at a cell whatever else is: the choice made beforehand, the default's."""
        default = self.default(problem)
        choice = default if self.choices is None else self.choices[problem]
        return [default] if choice.id == default.id else [choice, default]

    def variants(self, contract: Contract) -> list[Variant]:
        """Every decode variant that a contract needs compiled and checked, each once."""
        found = {v.id: v for v in self.tried[contract]}
        for problem in self.problems:
            if problem.contract == contract:
                for v in self.named(problem):
                    found.setdefault(v.id, v)
        return list(found.values())

    def candidates(self, problem: Problem, usable: Usable) -> list[Variant]:
        """The decode variants to time at a cell, those that are named first."""
        c = problem.contract
        named = [v for v in self.named(problem) if (c, v.id) in usable.sound]
        ids = {v.id for v in named}
        return [*named, *(v for v in usable.tried[c] if v.id not in ids)]

    def effort(self, problem: Problem) -> Search:
        """What is spent on a cell."""
        return (
            self.config.search if self.choices is not None else cells.effort(self.config, problem)
        )

    def key(self, contract: Contract, variant: Variant) -> str:
        """The object of a variant, as the store names it."""
        return object_spec(kernels.get(variant.kernel), contract, variant, self.device).key

    def objects(self) -> list[tuple[ObjectSpec, str]]:
        """Every object that the run needs, with its kernel's compiler, each once."""
        found: dict[str, tuple[ObjectSpec, str]] = {}

        def add(contract: Contract, variant: Variant) -> None:
            kernel = kernels.get(variant.kernel)
            spec = object_spec(kernel, contract, variant, self.device)
            found.setdefault(spec.key, (spec, kernel.compiler))

        # First of all: the timing process needs them before any cell.
        found |= {pair[0].key: pair for pair in session_objects(self.device, {self.l2})}
        for problem in self.problems:
            for variant in self.named(problem):
                add(problem.contract, variant)
        for contract in self.tried:
            for variant in (*self.tried[contract], *self.floors[contract]):
                add(contract, variant)
        return list(found.values())


# As many decode variants as somebody lists by hand: of so few a contract's 102 floors would be most
# of what is compiled.
FEW = 8


def _floors(
    config: Config, device: Device, contract: Contract, tried: Sequence[Variant] | None = None
) -> tuple[Variant, ...]:
    """The floors of a contract. tried: the decode variants there, where they decide how many floors
    are worth compiling.
    """
    parts = config.parts_of(contract)
    few = tried is not None and len(tried) <= FEW and all(part.kernels for part in parts)
    if few and not any(part.names_floor(device.kind) for part in parts):
        found = kernels.serving(device, "floor")
        return tuple(v for k in found for v in k.few_variants(contract, device))
    return config.admitted(contract, kernels.variants(contract, device, "floor"))


def sweep_plan(
    config: Config, device: Device, judged: Sequence[Table] = (), l2: L2 | None = None
) -> Plan:
    """Every variant that a config admits at each of its cells.

    judged: tables whose choices are timed to the end there. l2: instead of the config's L2 policy.
    Raises ConfigError for held-out cells that cannot be, UnsupportedProblem for a judged table of
    another kind of device.
    """
    l2 = l2 or config.policy.l2
    for other in (t.device for t in judged if t.device.kind != device.kind):
        raise UnsupportedProblem(
            f"a table of {other.name} ({other.kind}) to be judged on {device.name}"
            f" ({device.kind}): expected a table of the same kind of device; leave it out"
        )
    # For its refusals alone, before minutes of compiling.
    cells.listed_held_out(config)
    tried = {
        c: config.admitted(c, kernels.variants(c, device, l2=l2)) for c in config.all_contracts()
    }
    return Plan(
        config,
        device,
        config.problems(),
        tried,
        {c: _floors(config, device, c, its) for c, its in tried.items()},
        judged=tuple(judged),
        l2=l2,
    )


def bench_plan(
    config: Config,
    device: Device,
    runtime: "Runtime",
    peers: Mapping[str, "Peer"],
    l2: L2 | None = None,
    dependent_launch: bool | None = None,
) -> Plan:
    """At each cell, cells of equal work units apart: what the runtime would call, the default
    rule's choice, the floors, and the entries of peers that serve it.

    l2: instead of the config's L2 policy. dependent_launch: what calls that allow it, or do not,
    get; None: in a chain what the table chose, since it chose there, elsewhere what calls without
    it get, since nothing runs ahead of them.
    """
    l2 = l2 or config.policy.l2
    problems = config.all_problems()
    if dependent_launch is None and l2 != "chain":
        dependent_launch = False

    def called(allowed: bool | None) -> dict[Problem, Variant]:
        # Through the runtime itself, so that a bench times what an engine would call.
        return {
            p: runtime.bind(p.contract, dependent_launch=allowed).choice(p.work_units).variant
            for p in problems
        }

    choices, origins = called(dependent_launch), _origins(config, runtime, peers)
    # Where it changes nothing, it makes no other bench.
    if dependent_launch is not None and choices != called(None):
        origins[LAUNCH] = "allowed" if dependent_launch else "not allowed"
    contracts = config.all_contracts()
    return Plan(
        config,
        device,
        problems,
        dict.fromkeys(contracts, ()),
        {c: _floors(config, device, c) for c in contracts},
        choices=choices,
        peers=peers,
        origins=origins,
        l2=l2,
    )


def _origins(config: Config, runtime: "Runtime", peers: Mapping[str, "Peer"]) -> dict[str, str]:
    """The tables that the choices come from, and the peers' versions."""
    found = {}
    for op in sorted({c.op for c in config.all_contracts()}):
        source = runtime.source(op)
        found[f"{TABLE}{op}"] = "none: the default rule"
        if source is not None:
            # By contents: a table that was replaced under its name is another bench.
            sha = hashlib.sha256(source.path.read_bytes()).hexdigest()
            found[f"{TABLE}{op}"] = f"{source.path.name} sha256 {sha[:16]}"
    for peer in peers.values():
        found[f"{PEER}{peer.name}"] = "not installed" if peer.absent() else peer.version()
    return found


def session_objects(device: Device, l2: Collection[str]) -> list[tuple[ObjectSpec, str]]:
    """What timing under L2 policies calls on a device beside what it times, with its compiler: what
    empties the cache between samples, in a chain also what writes each layer's inputs.
    """
    if device.kind != "cuda":
        return []
    called = {
        "flush": kernels.flush(),
        **({"producer": kernels.producer()} if "chain" in l2 else {}),
    }
    return [
        (object_spec(kernel, contract, variant, device, label=label), kernel.compiler)
        for label, (contract, variant) in called.items()
        for kernel in (kernels.get(variant.kernel),)
    ]


def plan_objects(config: Config, device: Device) -> list[tuple[ObjectSpec, str]]:
    """Every object that a sweep of a config needs, with its kernel's compiler, each once."""
    return sweep_plan(config, device).objects()


def bench_objects(
    config: Config,
    device: Device,
    tables: Sequence[Path] = (),
    dependent_launch: bool | None = None,
) -> list[tuple[ObjectSpec, str]]:
    """Every object that a bench of a config needs, with its kernel's compiler, each once; peers
    bring their own. tables: instead of those in use for the device. dependent_launch: as of
    `bench_plan`.
    """
    from gdntune.objects.store import Store
    from gdntune.runtime.dispatch import Runtime

    runtime = Runtime(device, Store())
    for path in tables:
        runtime.use(path)
    plan = bench_plan(config, device, runtime, {}, dependent_launch=dependent_launch)
    return plan.objects()


def chosen_by(tables: Iterable[Table]) -> Choices:
    """What tables choose for a problem, for any call, by variants' ids; nothing where none has a
    rule for its contract.
    """
    every = [{rule.when: rule for rule in table.rules} for table in tables]

    def of(problem: Problem) -> frozenset[str]:
        found = (rules.get(problem.contract) for rules in every)
        return frozenset(
            rule.at(problem.work_units, dependent_launch).variant
            for rule in found
            if rule
            for dependent_launch in (True, False)
        )

    return of
