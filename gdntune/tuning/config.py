"""configs/*.yaml: what a sweep measures. Contracts, cells, kernels, timing policy and effort of the
search.
"""

import dataclasses
import difflib
import fnmatch
import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml

from gdntune import kernels, strict
from gdntune.device import arch
from gdntune.errors import ConfigError, listed, one_of
from gdntune.kernels.spec import Kernel, Variant
from gdntune.problem import MAX_TOKENS, Contract, Problem, contract_fault, problem_fault
from gdntune.results.workload import Load, read_trace
from gdntune.timing import Policy

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9._-]*$")]
Knob = Annotated[tuple[int | str | bool, ...], msgspec.Meta(min_length=1)]

# What is given once for all contracts of a part, and where.
_SHARED = {"tokens": "tokens", "K": "model.K", "V": "model.V"}
# The default of a key that a config with parts may leave to them; `parse` refuses a part without
# it.
_LEFT_OUT: Any = None
# The fields that every hash covers. One added since is left out while it has its default, so that
# published hashes stay true.
_HASHED = {
    "Config": "name model batch contracts about device shards tokens policy kernels search",
    "Part": "name model batch contracts shards tokens kernels",
    "Model": "H HV K V",
    "Policy": "timer l2",
    "Search": "screen_rounds keep final_rounds max_cell_seconds regret",
    "ContractPart": (
        "op layout input_dtype state_dtype gate_dtype beta_dtype A_log_dtype dt_bias_dtype gate"
        " beta mode intermediate accepted pool ragged"
    ),
}

if TYPE_CHECKING:
    ContractPart = Contract
else:
    ContractPart = msgspec.defstruct(
        "ContractPart",
        [
            (f.name, f.type, f.default)
            for f in msgspec.structs.fields(Contract)
            if f.name not in _SHARED
        ],
        frozen=True,
        forbid_unknown_fields=True,
    )


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole model's heads, unsharded: H q/k heads, HV value heads, head sizes K and V."""

    H: Count
    HV: Count
    K: Count = 128
    V: Count = 128


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cells that have no part in choosing: a batch size B of each contract, or of those with
    `tokens`, with a shard's heads.
    """

    batch: Count
    shards: Count = 1
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None


# Left out of a config it is this many; not as the field's default, since those that publish tables
# were hashed without it.
PLACEMENTS = 4


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a sweep spends on a cell.

    screen_rounds: samples by which the leaders are found: of all variants half of them, three at
        least, then of the better third the rest.
    keep: leaders timed again; where some variants use dependent launch and others do not, so many
        of the latter too. final_rounds: samples of each of them; 200 is where a 1% difference
        of means decides.
    placements: sets of tensors, each elsewhere in memory, among which the final rounds are shared
        out: on one set a variant's lead of 1% may be its place's. Four where it is left out.
    fresh_rounds: samples of each choice, and of what it is compared with, once it was made, on
        tensors of their own: these are the table's evidence. As many as final_rounds where left
        out, 0 for none.
    precision: where choices are made, rounds go on until the 95% intervals of the ratios to the
        choice are this narrow to either side, or the cell's time ends. 0: not.
    max_cell_seconds: a cell's timing ends here, with the rounds it has.
    regret: how much slower than a cell's best the chosen variant may be, where that saves an
        interval or a variant.
    bisect: where the choices of neighbouring cells differ, cells between them are timed until their
        work units are within this ratio, as 1.1; none where it is left out. extra_cells: how many a
        contract that adds at most.
    held_out: cells that the table is judged at and that have no part in it: a number for each
        contract, spread between its smallest and largest cell, or a list.
    workload: the steps of a serving engine, or a CSV of them, a path from the config's folder:
        cells get final rounds by their share of the steps, and the report says what a step saves.
    """

    screen_rounds: Count = 6
    keep: Count = 4
    final_rounds: Count = 200
    placements: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    fresh_rounds: Annotated[int, msgspec.Meta(ge=0)] | None = None
    precision: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    max_cell_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0
    regret: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    bisect: Annotated[float, msgspec.Meta(gt=1, le=16)] | None = None
    extra_cells: Count = 16
    held_out: Annotated[int, msgspec.Meta(ge=0, le=1000)] | tuple[HeldOut, ...] = 0
    workload: Annotated[tuple[Load, ...], msgspec.Meta(min_length=1)] | str | None = None

    @property
    def sets(self) -> int:
        """The placements, four where they are left out."""
        return PLACEMENTS if self.placements is None else self.placements


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's cells: its contracts at all its tokens, and its batch sizes at all its shards.

    batch: batch sizes B. shards: tensor-parallel shards; shard s has H/s and HV/s heads. tokens: T,
        each a contract of its own.
    contracts: what is computed, `Contract`'s fields without tokens, K and V, which come from
        `tokens` and `model`.
    kernels: where given, only these decode kernels are tried, and of each only the listed values of
        the listed knobs. Floors are named in the same way. Where eight decode variants or fewer are
        left and no floor is named, a few floors are timed; `stream: {}` stands for all.
    """

    name: Name
    model: Model = _LEFT_OUT
    batch: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)] = _LEFT_OUT
    contracts: Annotated[tuple[ContractPart, ...], msgspec.Meta(min_length=1)] = _LEFT_OUT
    shards: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)] = (1,)
    tokens: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)], ...], msgspec.Meta(min_length=1)
    ] = (1,)
    kernels: dict[str, dict[str, Knob]] = {}

    def own_contracts(self) -> tuple[Contract, ...]:
        """Every contract at every T, sorted, each once."""
        parts = [msgspec.structs.asdict(part) for part in self.contracts]
        sizes = {"K": self.model.K, "V": self.model.V}
        return tuple(
            sorted(
                {Contract(**{**part, **sizes, "tokens": t}) for part in parts for t in self.tokens}
            )
        )

    def own_cells(self) -> Iterator[tuple[int, Problem]]:
        """Every contract at each batch size of each shard, with the shards, the least first."""
        heads = [(s, self.model.H // s, self.model.HV // s) for s in sorted(self.shards)]
        for c in self.own_contracts():
            yield from ((s, Problem(c, B, H, HV)) for s, H, HV in heads for B in self.batch)

    def admits(self, variant: Variant) -> bool:
        """Whether `kernels` lets a variant be tried."""
        floor = _floor(variant.kernel)
        named = self.names_floor(floor.device) if floor else not all(map(_floor, self.kernels))
        if not named:
            return True
        wanted = self.kernels.get(variant.kernel)
        return wanted is not None and all(
            any(same(value, variant.knobs.get(knob)) for value in values)
            for knob, values in wanted.items()
        )

    def names_floor(self, device_kind: str) -> bool:
        """Whether `kernels` names a floor that runs on a kind of device."""
        return any(f.device == device_kind for f in map(_floor, self.kernels) if f)

    def values(self) -> Iterator[tuple[str, str, int | str | bool]]:
        """What `kernels` lists: kernel, knob and value."""
        for kernel, wanted in self.kernels.items():
            for knob, values in wanted.items():
                yield from ((kernel, knob, value) for value in values)


def _floor(name: str) -> Kernel | None:
    """The floor of a name; None for another kernel."""
    kernel = kernels.KERNELS.get(name)
    return kernel if kernel and kernel.role == "floor" else None


_INHERITED = tuple(f for f in Part.__struct_fields__ if f != "name")


class Config(Part, frozen=True, forbid_unknown_fields=True):
    """A config file. Made by `load` or `parse`.

    It is one part itself, or has `parts`, for which the keys of a part that stand at the top are
    the defaults; `parse` writes these into the parts, and leaves none at the top.
    """

    about: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    policy: Policy = msgspec.field(default_factory=Policy)
    search: Search = Search()
    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1)] = ()

    def each_part(self) -> tuple[Part, ...]:
        """The parts; of a config without any, itself."""
        return self.parts or (self,)

    def all_contracts(self) -> tuple[Contract, ...]:
        """Every contract of every part, sorted, each once."""
        return tuple(sorted({c for part in self.each_part() for c in part.own_contracts()}))

    def problems(self) -> tuple[Problem, ...]:
        """The cells, sorted by contract, then work units: each pair once, with the least sharded
        heads, of the first part that has them.
        """
        least: dict[tuple[Contract, int], tuple[int, Problem]] = {}
        for part in self.each_part():
            for shards, problem in part.own_cells():
                key = (problem.contract, problem.work_units)
                # Equal work units are one entry of a table: the least sharded problem has the most
                # heads a request.
                if key not in least or shards < least[key][0]:
                    least[key] = (shards, problem)
        return tuple(least[key][1] for key in sorted(least))

    def all_problems(self) -> tuple[Problem, ...]:
        """Every cell of every part, sorted, each contract, B, H and HV once, also where work units
        are equal: what a bench times.
        """
        return tuple(
            sorted({problem for part in self.each_part() for _, problem in part.own_cells()})
        )

    def admitted(self, contract: Contract, variants: Sequence[Variant]) -> tuple[Variant, ...]:
        """Those variants that a part with this contract lets be tried."""
        parts = self.parts_of(contract)
        return tuple(v for v in variants if any(part.admits(v) for part in parts))

    def parts_of(self, contract: Contract) -> list[Part]:
        """The parts with a contract."""
        return [part for part in self.each_part() if contract in part.own_contracts()]

    def only(self, patterns: Collection[str]) -> "Config":
        """A config of the parts whose names match a pattern (`gdn-*`), named after the patterns;
        ConfigError for one that matches none.
        """
        names = [part.name for part in self.parts]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                there = (
                    f"its parts are {listed(names)}"
                    if names
                    else "it has no parts: leave out --part"
                )
                raise ConfigError(
                    f"{self.name} has no part {pattern!r}{strict.near(pattern, names)}: {there}"
                )
        kept = tuple(
            part for part in self.parts if any(fnmatch.fnmatchcase(part.name, p) for p in patterns)
        )
        # Patterns name the folder of results, so only what a file name can hold is kept of them.
        labels = [re.sub("[^a-z0-9._-]", "", pattern).strip("._-") for pattern in patterns]
        return msgspec.structs.replace(
            self, name=".".join([self.name, *filter(None, labels)]), parts=kept
        )

    def check_kernels(self, known: Mapping[str, Kernel]) -> None:
        """Raises ConfigError where `kernels` names a kernel that is not known, or a knob that it
        has not.
        """
        names = {
            name: [f.name for f in dataclasses.fields(kernel.knobs)]
            for name, kernel in known.items()
        }
        for path, part in self._kernels():
            for kernel, wanted in part.kernels.items():
                if kernel not in names:
                    near = strict.near(kernel, names)
                    raise ConfigError(
                        f"{self.name}: {path} has the unknown key `{kernel}`{near}: expected"
                        f" {one_of(names)}"
                    )
                for knob in wanted:
                    if knob not in names[kernel]:
                        near = strict.near(knob, names[kernel])
                        raise ConfigError(
                            f"{self.name}: {path}.{kernel} has the unknown key `{knob}`{near}:"
                            f" expected {one_of(names[kernel])}"
                        )

    def check_knobs(self, known: Mapping[str, Kernel]) -> None:
        """Raises ConfigError where `kernels` lists a value that no legal variant has, at any
        contract of the parts that list it.

        For a whole file: what `only` leaves of one may lack the part that a value is for.
        """
        worth = _Worth()
        for path, part in self._kernels():
            for kernel, knob, value in part.values():
                listing = [
                    p
                    for p in self.each_part()
                    if any(same(x, value) for x in p.kernels.get(kernel, {}).get(knob, ()))
                ]
                contracts = sorted({c for p in listing for c in p.own_contracts()})
                accepted = _refused(known[kernel], knob, value, contracts, worth)
                if accepted is not None:
                    said = (
                        f"expected {one_of(accepted)}"
                        if accepted
                        else f"{kernel} serves none of the contracts, leave it out"
                    )
                    raise ConfigError(
                        f"{self.name}: {path}.{kernel}.{knob} lists {value}, which no legal variant"
                        f" has at the contracts: {said}"
                    )

    def _kernels(self) -> Iterator[tuple[str, Part]]:
        """The parts, each with the path of its `kernels`."""
        for i, part in enumerate(self.each_part()):
            yield (f"$.parts[{i}].kernels" if self.parts else "$.kernels"), part

    @property
    def sha256(self) -> str:
        """Of what decides the sweep: comments, the order of keys, defaults written out and `about`
        do not change it.
        """
        content = msgspec.json.encode(
            _hashed(msgspec.structs.replace(self, about="")), order="sorted"
        )
        return hashlib.sha256(content).hexdigest()


def same(a: Any, b: Any) -> bool:
    """Whether two values of a knob are equal; True is not 1."""
    return type(a) is type(b) and a == b


class _Worth:
    """The values of each knob that are worth trying, of a kernel and a contract: looked up once,
    since a file lists many values and a space has hundreds of settings.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, Contract], dict[str, list[Any]]] = {}

    def trying(self, kernel: Kernel, contract: Contract) -> dict[str, list[Any]]:
        """By knob; empty where the kernel does not serve the contract."""
        key = kernel.name, contract
        if key not in self._found:
            self._found[key] = _worth_trying(kernel, contract)
        return self._found[key]


def _refused(
    kernel: Kernel, knob: str, value: Any, contracts: Sequence[Contract], worth_of: _Worth
) -> list[Any] | None:
    """None where a legal variant has a value of a knob at one of the contracts, else the values
    that are worth trying there.

    Legal is what is worth trying, and what the kernel does not refuse of the value with all that
    others are worth trying with.
    """
    # Of each contract, the values of each knob.
    worth = [worth_of.trying(kernel, contract) for contract in contracts]
    found = dict.fromkeys(x for values in worth for x in values.get(knob, ()))
    if any(same(x, value) for x in found):
        return None
    # A kernel is not asked about another type, nor about less than nothing: its arithmetic would
    # raise instead of refuse.
    if any(type(x) is type(value) for x in found) and (type(value) is not int or value > 0):
        for contract, values in zip(contracts, worth, strict=True):
            settings = itertools.product(*{**values, knob: [value]}.values()) if values else ()
            if any(not kernel.fault(contract, kernel.knobs(*setting)) for setting in settings):
                return None
    return sorted(found)


def _worth_trying(kernel: Kernel, contract: Contract) -> dict[str, list[Any]]:
    """The values of each knob in a kernel's space, or in its default rule; empty where it does not
    serve the contract.
    """
    device = arch.detect("cpu") if kernel.device == "cpu" else arch.target("sm_90a")
    try:
        # A kernel with nothing to try still has its default rule's setting.
        settings = kernel.space(contract, device) or (kernel.default(contract, 1, device),)
        if kernel.fault(contract, settings[0]):
            return {}
    except ValueError:
        return {}
    names = [f.name for f in dataclasses.fields(kernel.knobs)]
    return {name: list(dict.fromkeys(getattr(s, name) for s in settings)) for name in names}


def _hashed(value: Any) -> Any:
    """Plain data that a hash is of: a struct without the fields that came after its first hash and
    have their defaults.
    """
    if isinstance(value, tuple):
        return [_hashed(x) for x in value]
    if not isinstance(value, msgspec.Struct):
        return value
    first = _HASHED.get(type(value).__name__, "").split()
    fields = {f.name: (getattr(value, f.name), f.default) for f in msgspec.structs.fields(value)}
    return {
        name: _hashed(x) for name, (x, default) in fields.items() if name in first or x != default
    }


def load(path: str | os.PathLike[str]) -> Config:
    """The config in a YAML file, with the steps of a workload's CSV; ConfigError names the file,
    the key's path, and what is expected.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        there = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.stem, there, n=1)
        meant = path.with_name(close[0] + ".yaml") if close else path
        hint = f" (did you mean {meant}?)" if meant != path else ""
        raise ConfigError(
            f"{path}: {e.strerror}{hint}; expected a YAML file such as configs/quickstart.yaml"
        ) from e
    config = parse(data, str(path))
    trace = config.search.workload
    if isinstance(trace, str):
        search = msgspec.structs.replace(config.search, workload=read_trace(path.parent / trace))
        config = msgspec.structs.replace(config, search=search)
    return config


def parse(data: bytes | str, source: str = "<config>") -> Config:
    """The config in YAML text, checked as a whole; `source` names it in errors.

    Raises ConfigError for what no sweep could run: keys, sizes, kernels, and values of knobs that
    no legal variant has.
    """
    raw = _plain(data, source)
    if raw is None:
        raise ConfigError(
            f"{source}: it is empty; expected a config, such as `gdntune config show quickstart`"
            " prints"
        )
    written = _parts_of(raw)
    for path, part in [("$", raw), *((f"$.parts[{i}]", part) for i, part in enumerate(written))]:
        _check_contracts(part, path, source)
    # The contracts' own check comes first: of a field that the part gives, msgspec would only say
    # that it is unknown.
    config: Config = strict.convert(raw, Config, source, ConfigError)
    if config.parts:
        # From the raw text, not the struct: only what was written is inherited, no default.
        shared = {name: raw[name] for name in _INHERITED if name in raw}
        parts = tuple(msgspec.convert({**shared, **part}, Part) for part in written)
        config = Config(
            name=config.name, about=config.about, device=config.device, policy=config.policy,
            search=config.search, parts=parts,
        )  # fmt: skip
    for where, fault in _faults(config, written):
        raise ConfigError(f"{source}: {where}{fault}")
    config.check_kernels(kernels.KERNELS)
    # After the kernels' names, which it looks up.
    config.check_knobs(kernels.KERNELS)
    return config


def _parts_of(raw: Any) -> list[Any]:
    parts = raw.get("parts") if isinstance(raw, dict) else None
    return parts if isinstance(parts, list) else []


def _check_contracts(raw: Any, path: str, source: str) -> None:
    """Refuses what a contract may not have since its part gives it; the type alone would call it
    unknown.
    """
    contracts = raw.get("contracts") if isinstance(raw, dict) else None
    for i, contract in enumerate(contracts if isinstance(contracts, list) else ()):
        for name in _SHARED.keys() & contract.keys() if isinstance(contract, dict) else ():
            raise ConfigError(
                f"{source}: {path}.contracts[{i}].{name} is {strict.short(contract[name])}: "
                f"{name} is the same for all contracts; give it once, as {path}.{_SHARED[name]}"
            )


def _faults(config: Config, written: list[Any]) -> Iterator[tuple[str, str]]:
    """What no single value shows: where, and what is wrong with it. written: the parts as they
    stand in the file.
    """
    names = [part.name for part in config.parts]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield (
                f"$.parts[{i}].name",
                (
                    f" is {name!r}, as $.parts[{names.index(name)}].name is: expected a name of"
                    " its own"
                ),
            )
    for i, part in enumerate(config.each_part()):
        keys, path = (written[i], f"$.parts[{i}]") if config.parts else (_INHERITED, "$")
        for key, below, fault in _part_faults(part):
            if not key:
                yield path, fault
            elif key in keys:
                yield f"{path}.{key}{below}", fault
            else:
                # Inherited, so the top is to blame, or not fit for this part.
                yield f"$.{key}{below}", f"{fault} (in {path}, {part.name})"


def _part_faults(part: Part) -> Iterator[tuple[str, str, str]]:
    """The key that is to blame, or none, the place below it, and what is wrong."""
    lacking = [name for name in ("model", "batch", "contracts") if getattr(part, name) is _LEFT_OUT]
    if lacking:
        yield (
            "",
            "",
            (
                f" lacks the key `{lacking[0]}`: a config gives it at the top, or in each of its"
                " `parts`"
            ),
        )
        return
    # Cells are made of sizes; their faults would only repeat these.
    sizes = list(_size_faults(part))
    yield from sizes or (
        ("", "", f": {fault}") for _, p in part.own_cells() if (fault := problem_fault(p))
    )


def _size_faults(part: Part) -> Iterator[tuple[str, str, str]]:
    H, HV = part.model.H, part.model.HV
    if HV % H:
        yield (
            "model",
            ".HV",
            f": HV={HV} is not a multiple of H={H}: each q/k head serves HV/H value heads",
        )
    for i, s in enumerate(part.shards):
        if H % s:
            possible = listed(n for n in range(1, min(H, 1024) + 1) if H % n == 0)
            why = "less than one q/k head" if s > H else "a fraction of a q/k head"
            yield (
                "shards",
                f"[{i}]",
                f": {s} shards of H={H} have {why} each: expected one of {possible}",
            )
    for i, contract in enumerate(part.contracts):
        fields = {
            **msgspec.structs.asdict(contract),
            "K": part.model.K,
            "V": part.model.V,
            "tokens": part.tokens[0],
        }
        if fault := contract_fault(Contract(**fields)):
            key, _, below = _SHARED.get(fault.partition("=")[0], "contracts").partition(".")
            yield (
                key,
                f".{below}" if below else f"[{i}]" if key == "contracts" else "",
                f": {fault}",
            )


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which the last would silently win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, not where mappings are constructed: by then a merge (`<<`) has put its keys
        # among the node's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None,
                        None,
                        f"the key `{key.value}` stands twice in one mapping: leave one",
                        key.start_mark,
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
        raise ConfigError(
            f"{source}{where}: the byte {e.object[e.start]:#x} is no UTF-8; expected UTF-8"
        ) from None
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        context = f" ({e.context})" if e.context else ""
        raise ConfigError(
            f"{source}{where}: {e.problem}{context}; expected YAML's safe subset"
        ) from None
    except yaml.reader.ReaderError as e:
        raise ConfigError(
            f"{source}{_place(text, e.position)}: {e.reason}; expected printable text"
        ) from None
    # What looks like a date or a number and is none.
    except (ValueError, OverflowError) as e:
        raise ConfigError(
            f"{source}: a value that YAML cannot read: {e}; put it in quotes"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply: a config has four levels") from None
