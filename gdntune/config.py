"""configs/*.yaml: what a sweep measures. Contracts, cells, kernels, timing policy and effort of the search."""

import difflib
import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml

from gdntune import strict
from gdntune.errors import ConfigError, listed
from gdntune.kernels.spec import Variant
from gdntune.problem import MAX_TOKENS, Contract, Problem, contract_fault, problem_fault
from gdntune.timing import Policy

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9._-]*$")]
Knob = Annotated[tuple[int | str | bool, ...], msgspec.Meta(min_length=1)]

# What a config gives once for all its contracts.
_SHARED = {"tokens": "$.tokens", "K": "$.model.K", "V": "$.model.V"}

if TYPE_CHECKING:
    ContractPart = Contract
else:
    ContractPart = msgspec.defstruct(
        "ContractPart",
        [(f.name, f.type, f.default) for f in msgspec.structs.fields(Contract) if f.name not in _SHARED],
        frozen=True,
        forbid_unknown_fields=True,
    )


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole model's heads, before any sharding: H q/k heads, HV value heads, head sizes K and V."""

    H: Count
    HV: Count
    K: Count = 128
    V: Count = 128


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a sweep spends on a cell.

    screen_rounds: samples of every variant in the first look. keep: leaders timed again. final_rounds: samples of each of them;
    200 is where a 1% difference of means decides. max_cell_seconds: a cell's timing ends here, with the rounds it has.
    regret: how much slower than a cell's best the chosen variant may be, where that saves an interval or a variant.
    """

    screen_rounds: Count = 6
    keep: Count = 4
    final_rounds: Count = 200
    max_cell_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0
    regret: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A config file. Made by `load` or `parse`.

    batch: batch sizes B. shards: tensor-parallel shards; shard s has H/s and HV/s heads. tokens: T, each a contract of its own.
    contracts: what is computed, `Contract`'s fields without tokens, K and V, which come from `tokens` and `model`.
    kernels: where given, only these decode kernels are tried, and of each only the listed values of the listed knobs.
    """

    name: Name
    model: Model
    batch: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    contracts: Annotated[tuple[ContractPart, ...], msgspec.Meta(min_length=1)]
    about: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    shards: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)] = (1,)
    tokens: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)], ...], msgspec.Meta(min_length=1)] = (1,)
    policy: Policy = msgspec.field(default_factory=Policy)
    kernels: dict[str, dict[str, Knob]] = {}
    search: Search = Search()

    def all_contracts(self) -> tuple[Contract, ...]:
        """Every contract at every T, sorted, each once."""
        parts = [msgspec.structs.asdict(part) for part in self.contracts]
        sizes = {"K": self.model.K, "V": self.model.V}
        return tuple(sorted({Contract(**{**part, **sizes, "tokens": t}) for part in parts for t in self.tokens}))

    def problems(self) -> tuple[Problem, ...]:
        """The cells, sorted by contract, then work units: each pair once, with the least sharded heads that give it."""
        sizes: dict[int, tuple[int, int, int]] = {}
        for s in sorted(self.shards):
            for B in self.batch:
                sizes.setdefault(B * self.model.HV // s, (B, self.model.H // s, self.model.HV // s))
        return tuple(Problem(c, *sizes[w]) for c in self.all_contracts() for w in sorted(sizes))

    def admits(self, variant: Variant) -> bool:
        """Whether `kernels` lets a decode variant be tried."""
        if not self.kernels:
            return True
        wanted = self.kernels.get(variant.kernel)
        return wanted is not None and all(
            any(type(value) is type(variant.knobs.get(knob)) and value == variant.knobs.get(knob) for value in values)
            for knob, values in wanted.items()
        )

    def check_kernels(self, knobs: Mapping[str, Collection[str]]) -> None:
        """Raises ConfigError where `kernels` names a kernel, or a knob of it, that `knobs` (names by kernel) has not."""
        for kernel, wanted in self.kernels.items():
            if kernel not in knobs:
                near = strict.near(kernel, knobs)
                raise ConfigError(
                    f"{self.name}: $.kernels has the unknown key `{kernel}`{near}: accepted are {listed(knobs)}"
                )
            for knob in wanted:
                if knob not in knobs[kernel]:
                    near, names = strict.near(knob, knobs[kernel]), listed(knobs[kernel])
                    raise ConfigError(
                        f"{self.name}: $.kernels.{kernel} has the unknown key `{knob}`{near}: accepted are {names}"
                    )

    @property
    def sha256(self) -> str:
        """Of what decides the sweep: comments, the order of keys, defaults written out and `about` do not change it."""
        content = msgspec.json.encode(msgspec.structs.replace(self, about=""), order="sorted")
        return hashlib.sha256(content).hexdigest()


def load(path: str | os.PathLike[str]) -> Config:
    """The config in a YAML file; ConfigError names the file, the key's path, what stood there and what is accepted."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        there = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.stem, there, n=1)
        hint = f"; did you mean {path.with_name(close[0] + '.yaml')}?" if close else ""
        raise ConfigError(f"{path}: {e.strerror}{hint}; accepted is a YAML file such as configs/quickstart.yaml") from e
    return parse(data, str(path))


def parse(data: bytes | str, source: str = "<config>") -> Config:
    """The config in YAML text; `source` names it in errors."""
    raw = _plain(data, source)
    if isinstance(raw, dict) and isinstance(raw.get("contracts"), list):
        for i, part in enumerate(raw["contracts"]):
            for name in _SHARED.keys() & part.keys() if isinstance(part, dict) else ():
                raise ConfigError(
                    f"{source}: $.contracts[{i}].{name} is {strict.short(part[name])}: "
                    f"{name} is the same for all contracts; give it once, as {_SHARED[name]}"
                )
    config: Config = strict.convert(raw, Config, source, ConfigError)
    for where, fault in _faults(config):
        raise ConfigError(f"{source}: {where}: {fault}")
    return config


def _faults(config: Config) -> list[tuple[str, str]]:
    """What no single value shows: where, and what is wrong with it."""
    found: list[tuple[str, str]] = []
    H, HV = config.model.H, config.model.HV
    if HV % H:
        found.append(("$.model.HV", f"HV={HV} is not a multiple of H={H}: each q/k head serves HV/H value heads"))
    for i, s in enumerate(config.shards):
        if H % s:
            possible = listed(n for n in range(1, min(H, 1024) + 1) if H % n == 0)
            why = "less than one q/k head" if s > H else "a fraction of a q/k head"
            found.append((f"$.shards[{i}]", f"{s} shards of H={H} have {why} each: accepted are {possible}"))
    for i, part in enumerate(config.contracts):
        fields = {**msgspec.structs.asdict(part), "K": config.model.K, "V": config.model.V, "tokens": config.tokens[0]}
        if fault := contract_fault(Contract(**fields)):
            name = fault.partition("=")[0]
            found.append((_SHARED.get(name, f"$.contracts[{i}]"), fault))
    if not found:
        found += [("$", fault) for problem in config.problems() if (fault := problem_fault(problem))]
    return found


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which the last would silently win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, not where mappings are constructed: by then a merge (`<<`) has put its keys among the node's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key `{key.value}` stands twice in one mapping: leave one", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def _place(text: str, position: int) -> str:
    before = text[:position]
    return f", line {before.count(chr(10)) + 1}, column {position - before.rfind(chr(10))}"


def _plain(data: bytes | str, source: str) -> Any:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        where = _place(e.object[: e.start].decode("utf-8", "replace"), e.start)
        raise ConfigError(f"{source}{where}: the byte {e.object[e.start]:#x} is no UTF-8; accepted is UTF-8") from None
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        context = f" ({e.context})" if e.context else ""
        raise ConfigError(f"{source}{where}: {e.problem}{context}; accepted is YAML's safe subset") from None
    except yaml.reader.ReaderError as e:
        raise ConfigError(f"{source}{_place(text, e.position)}: {e.reason}; accepted is printable text") from None
    except (ValueError, OverflowError) as e:  # of what looks like a date or a number and is none
        raise ConfigError(f"{source}: a value that YAML cannot read: {e}; put it in quotes") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply: a config has four levels") from None
