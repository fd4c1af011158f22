"""gdntune/config.py: what a config file may say, and what it is told where it may not."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import yaml
from config_files import SMALL, read

from gdntune.device import arch
from gdntune.errors import ConfigError
from gdntune.kernels.spec import FLOORS, Variant, floor_name
from gdntune.problem import Contract, problem_fault
from gdntune.results import table
from gdntune.tuning import config
from gdntune.tuning.plan import sweep_plan

ROOT = Path(__file__).parents[2]


CONFIGS = ROOT / "configs"


SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_are_legal(path):
    """Every file in configs/ loads, is named as its file, and gives legal, distinct, sorted cells."""
    c = config.load(path)
    problems = c.problems()
    assert c.name == path.stem
    assert [problem_fault(p) for p in problems if problem_fault(p)] == []
    keys = [(p.contract, p.work_units) for p in problems]
    assert keys == sorted(set(keys))


def test_a_space_is_looked_through_once(monkeypatch):
    """Fault: each listed value had the spaces of all contracts looked through again, and
    configs/shipped.yaml took 2 s of CPU time to load, of which 1.5 were these.
    """
    asked, look = Counter(), config._worth_trying

    def counted(kernel, contract):
        asked[kernel.name, contract] += 1
        return look(kernel, contract)

    monkeypatch.setattr(config, "_worth_trying", counted)
    config.load(CONFIGS / "shipped.yaml")
    assert set(asked.values()) == {1}


@pytest.mark.parametrize("name, heads", [("qwen3-next-80b-a3b", 32), ("qwen3.5-397b-a17b", 64)])
def test_model_configs_cover_every_shard(name, heads):
    """Each (shard, power-of-two batch) of a model has a cell at its work units, in 13 to 60 cells a
    contract.
    """
    c = config.load(CONFIGS / f"{name}.yaml")
    units = {p.work_units for p in c.problems()}
    assert {b * heads // s for b in (2**i for i in range(10)) for s in (1, 2, 4, 8)} <= units
    assert 13 <= len(units) <= 60
    assert len(c.all_contracts()) == 16
    assert len(c.problems()) == 16 * len(units)
    assert {(k.mode, k.pool, k.gate, k.beta, k.input_dtype) for k in c.all_contracts()} == {
        ("update", True, "raw", "logit", "bf16")
    }


def test_cells_take_the_least_sharded_heads():
    """Two shards that give equal work units share one cell, with the heads of the smaller shard."""
    problems = read(shards=[4, 1, 2], batch=[1, 2, 4]).problems()
    assert [(p.work_units, p.B, p.H, p.HV) for p in problems] == [
        (2, 1, 1, 2),
        (4, 1, 2, 4),
        (8, 1, 4, 8),
        (16, 2, 4, 8),
        (32, 4, 4, 8),
    ]


def test_contracts_take_sizes_from_the_model_and_tokens():
    """K, V and T are given once; equal contracts count once."""
    c = read(
        model={"H": 1, "HV": 1, "K": 64, "V": 96},
        tokens=[3, 1, 3],
        contracts=[{"state_dtype": "fp32"}] * 2,
    )
    assert c.all_contracts() == tuple(
        Contract(tokens=t, K=64, V=96, state_dtype="fp32") for t in (1, 3)
    )


def test_defaults():
    """What is left out has the documented defaults."""
    c = read()
    assert (c.device, c.shards, c.tokens, c.kernels) == ("auto", (1,), (1,), {})
    assert (c.policy.timer, c.policy.l2) == ("auto", "cold-clean")
    assert c.search == config.Search(
        screen_rounds=6, keep=4, final_rounds=200, max_cell_seconds=60.0, regret=0.01
    )


def test_parts_have_the_defaults_of_the_top():
    """A part has the top's value of each key that it does not give, and its own of each that it
    gives, as a whole.
    """
    kernels_ = {"recurrent": {"ilp": [1], "vec": [8]}}
    own = {
        "model": {"H": 2, "HV": 2, "V": 64},
        "tokens": [3],
        "contracts": [{"state_dtype": "fp32"}],
        "shards": [2],
    }
    own |= {"batch": [7], "kernels": {"recurrent": {"ilp": [2]}}}
    c = read(tokens=[1, 2], kernels=kernels_, parts=[{"name": "a"}, {"name": "b", **own}])
    first, second = c.parts
    assert (first.tokens, first.shards, first.batch, first.kernels["recurrent"]) == (
        (1, 2), (1,), (1, 2), {"ilp": (1,), "vec": (8,)},
    )  # fmt: skip
    assert second.kernels == {"recurrent": {"ilp": (2,)}}
    assert second.own_contracts() == (Contract(tokens=3, V=64, state_dtype="fp32"),)
    assert [(p.B, p.H, p.HV) for p in c.problems() if p.contract.V == 64] == [(7, 1, 1)]
    assert c.all_contracts() == tuple(sorted(first.own_contracts() + second.own_contracts()))
    assert (
        read(parts=[{"name": "a"}, {"name": "b", "kernels": {}}], kernels=kernels_).parts[1].kernels
        == {}
    )


def test_cells_of_parts_are_a_union():
    """A pair of contract and work units that several parts have is one cell, of the part that
    shards it least, else of the first.
    """
    model = {"H": 4, "HV": 4}
    parts = [
        {"name": "sharded", "shards": [4, 2], "batch": [2, 4]},
        {"name": "first", "model": model, "batch": [2, 4]},
        {"name": "second", "model": {"H": 2, "HV": 4}, "batch": [2, 8]},
        {"name": "other", "contracts": [{"state_dtype": "fp32"}], "batch": [1]},
    ]
    c = read(parts=parts)
    assert [(p.contract.state_dtype, p.work_units, p.B, p.H, p.HV) for p in c.problems()] == [
        ("bf16", 4, 2, 1, 2),
        ("bf16", 8, 2, 4, 4),
        ("bf16", 16, 4, 4, 4),
        ("bf16", 32, 8, 2, 4),
        ("fp32", 8, 1, 4, 8),
    ]


def test_a_bench_has_every_cell_of_every_part():
    """Fault: a part of few heads lost each cell whose work units a part of more heads has. Equal
    sizes count once, shards too.
    """
    parts = [
        {"name": "many", "model": {"H": 2, "HV": 4}, "batch": [2, 1]},
        {"name": "few", "model": {"H": 1, "HV": 1}, "batch": [1, 2, 4]},
        {"name": "other-h", "model": {"H": 4, "HV": 4}, "batch": [2]},
        {"name": "sharded", "model": {"H": 4, "HV": 8}, "shards": [4, 2], "batch": [2]},
    ]
    c = read(parts=parts)
    assert [(p.B, p.H, p.HV) for p in c.problems()] == [(1, 1, 1), (2, 1, 1), (1, 2, 4), (2, 2, 4)]
    found = c.all_problems()
    assert [(p.B, p.H, p.HV) for p in found] == [
        (1, 1, 1), (1, 2, 4), (2, 1, 1), (2, 1, 2), (2, 2, 4), (2, 4, 4), (4, 1, 1),
    ]  # fmt: skip
    assert set(c.problems()) <= set(found)
    assert {p for part in parts for p in c.only([part["name"]]).all_problems()} == set(found)


def test_the_bench_of_peers_has_all_its_parts_cells():
    """configs/bench-peers.yaml: run together its parts have the cells that each has alone; 8 heads
    stand beside 64 of equal B*HV.
    """
    c = config.load(CONFIGS / "bench-peers.yaml")
    alone = [c.only([part.name]).all_problems() for part in c.parts]
    assert {p for problems in alone for p in problems} == set(c.all_problems())
    assert {p.B for p in c.all_problems() if p.HV == 8} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}


def test_one_part_is_the_flat_config():
    """What a flat config says and a config whose only part says it have the same cells and
    contracts.
    """
    flat = read(shards=[1, 2], tokens=[1, 4])
    part = {k: v for k, v in SMALL.items() if k != "name"} | {"shards": [1, 2], "tokens": [1, 4]}
    parted = config.parse(yaml.safe_dump({"name": "small", "parts": [{"name": "only", **part}]}))
    assert (parted.problems(), parted.all_contracts()) == (flat.problems(), flat.all_contracts())


def test_only_takes_parts_by_name_or_pattern():
    """`only` keeps the parts that are named, in the file's order, and refuses a pattern that is of
    no use.
    """
    c = read(
        parts=[
            {"name": n, "batch": [i]} for i, n in enumerate(("decode", "verify-a", "verify-b"), 1)
        ]
    )
    one = c.only(["verify-b"])
    assert (one.name, [p.name for p in one.parts], [p.B for p in one.problems()]) == (
        "small.verify-b", ["verify-b"], [3],
    )  # fmt: skip
    assert [p.name for p in c.only(["verify-*", "decode"]).parts] == [
        "decode",
        "verify-a",
        "verify-b",
    ]
    names = {"verify-*": "small.verify", "*-?": "small", "[dv]*": "small.dv"}
    assert {pattern: c.only([pattern]).name for pattern in names} == names
    assert c.only(["verify-*", "decode"]).name == "small.verify.decode"
    assert len({c.sha256, one.sha256, c.only(["verify-*"]).sha256}) == 3
    with pytest.raises(
        ConfigError,
        match=r"no part 'decoed' \(did you mean `decode`\?\): its parts are decode, verify-a",
    ):
        c.only(["verify-*", "decoed"])
    with pytest.raises(ConfigError, match="it has no parts"):
        read().only(["decode"])


def test_sha256_covers_what_decides_the_sweep():
    """Comments, key order, `about` and written-out defaults leave the hash alone; anything else
    changes it.
    """
    base = read()
    assert read(about="words", device="auto", tokens=[1]).sha256 == base.sha256
    others = [
        read(batch=[1]),
        read(search={"keep": 5}),
        read(policy={"l2": "warm"}),
        read(kernels={"recurrent": {}}),
    ]
    assert len({base.sha256, *(c.sha256 for c in others)}) == 5


def test_sha256_of_parts():
    """A key inherited or written out is the same sweep; a part's own values, kernels and policy are
    not.
    """
    base = read(tokens=[2], parts=[{"name": "a"}, {"name": "b", "batch": [8]}])
    assert (
        read(
            parts=[{"name": "a", "tokens": [2]}, {"name": "b", "tokens": [2], "batch": [8]}]
        ).sha256
        == base.sha256
    )
    others = [
        read(tokens=[2], parts=[{"name": "a"}]),
        read(tokens=[2], parts=[{"name": "a"}, {"name": "b", "batch": [9]}]),
        read(
            tokens=[2],
            parts=[{"name": "a"}, {"name": "b", "batch": [8], "kernels": {"recurrent": {}}}],
        ),
        read(tokens=[2], parts=[{"name": "a"}, {"name": "b", "batch": [8]}], policy={"l2": "warm"}),
        read(tokens=[2]),
    ]
    assert len({base.sha256, *(c.sha256 for c in others)}) == 6


PUBLISHED = {
    "qwen3.5-397b-a17b": "c5e78824c001adbbeee0d73e982b606e56f22b3aa859c051586eb5aeb37a0801",
    "kimi-linear-48b-a3b": "9fbd8deb785be8ff1f82c79d19c9fb25eea92b51f05a5b2f6a4c9fea4504e28f",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_hashes_stay_true(name):
    """Journals and tables name these configs by these hashes, whatever fields configs got since."""
    assert config.load(CONFIGS / f"{name}.yaml").sha256 == PUBLISHED[name]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("tables/*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_shipped_tables_name_their_configs(path):
    """A config in configs/ that a shipped table stands on has the hash that the table says."""
    evidence = table.load(path).evidence
    for source in evidence.sources or (evidence,):
        file = CONFIGS / f"{source.config}.yaml"
        if file.exists():
            assert config.load(file).sha256 == source.config_sha256


@pytest.mark.parametrize("struct", ["search", "policy"])
def test_every_field_is_hashed(struct):
    """A value other than the default changes the hash, of a field from the first day or a later
    one.
    """
    base = read()
    part = getattr(base, struct)
    hashes = {base.sha256}
    for name in part.__struct_fields__:
        hashes.add(
            msgspec.structs.replace(
                base, **{struct: msgspec.structs.replace(part, **{name: 12345})}
            ).sha256
        )
    assert len(hashes) == 1 + len(part.__struct_fields__)


def test_a_new_field_leaves_old_hashes_alone():
    """A field that came later is in the hash only where it has not its default."""

    class Later(config.Search, frozen=True):
        threads: int = 1

    Later.__name__ = "Search"
    base = read()
    with_default = msgspec.structs.replace(base, search=Later())
    assert with_default.sha256 == base.sha256
    assert msgspec.structs.replace(base, search=Later(threads=2)).sha256 != base.sha256


def test_kernels_restrict_variants():
    """`kernels` leaves the named kernels, and of each the listed values; True is not 1."""
    c = read(kernels={"recurrent": {"tile_v": [16, 32], "early": [True]}})
    variant = Variant("recurrent", "r", {"tile_v": 16, "ilp": 4, "early": True})
    assert c.admits(variant)
    assert not c.admits(msgspec.structs.replace(variant, kernel="other"))
    for change in ({"tile_v": 64}, {"early": 1}, {"early": False}):
        assert not c.admits(msgspec.structs.replace(variant, knobs={**variant.knobs, **change}))
    assert read().admits(variant)
    assert c.admitted(Contract(), [variant, msgspec.structs.replace(variant, kernel="other")]) == (
        variant,
    )


def test_kernels_name_floors_apart():
    """Floors and decode kernels are restricted each by its own names: a config that named a decode
    variant alone compiled all 102 floors, and could not ask for fewer.
    """
    decode, floor = Variant("recurrent", "r", {"ilp": 4}), Variant("stream", "s", {"ilp": 4})
    cases = (
        ({}, (True, True)),
        ({"recurrent": {"ilp": [4]}}, (True, True)),
        ({"recurrent": {"ilp": [2]}}, (False, True)),
        ({"stream": {"ilp": [2]}}, (True, False)),
        ({"stream": {}}, (True, True)),
        ({"recurrent": {"ilp": [4]}, "stream": {"ilp": [2]}}, (True, False)),
        # A floor of another device says nothing of this one's.
        ({"cpu_stream": {"ilp": [1]}}, (True, True)),
    )
    for named, admitted in cases:
        c = read(kernels=named)
        assert (c.admits(decode), c.admits(floor)) == admitted, named


ONE = {
    "tile_v": [16],
    "ilp": [1],
    "lanes": [8],
    "threads": [128],
    "spread": [False],
    "heads": [False],
}


@pytest.mark.parametrize(
    "named, floors",
    [
        ({"recurrent": ONE}, 8),
        ({"recurrent": ONE, "stream": {}}, 102),
        ({"recurrent": ONE, "stream": {"threads": [64], "ilp": [4], "early": [False]}}, 6),
        ({"recurrent": {}}, 102),
        ({}, 102),
    ],
)
def test_one_variant_needs_few_floors(named, floors):
    """A config that names one variant compiles it, the default rule's choice, the floors it needs
    and the flush; it was 110 objects, of which 102 were floors.
    """
    contract = {"contracts": [{"state_dtype": "bf16"}], "tokens": [1], "device": "cuda"}
    plan = sweep_plan(read(kernels=named, **contract), arch.target("sm_90a"))
    ((tried, found),) = zip(plan.tried.values(), plan.floors.values(), strict=True)
    assert len(found) == floors
    assert {floor_name(v) for v in found} == set(FLOORS)
    if len(tried) == 1:
        assert len(plan.objects()) == floors + 3


def test_kernels_of_parts_restrict_their_contracts():
    """A variant is tried for a contract where one of the parts that have it admits it; the order
    stays.
    """
    both, fp32 = (
        {"contracts": [{}, {"state_dtype": "fp32"}]},
        {"contracts": [{"state_dtype": "fp32"}]},
    )
    parts = [
        {"name": "a", **both, "kernels": {"recurrent": {"ilp": [1]}}},
        {"name": "b", **fp32, "kernels": {"recurrent": {"ilp": [4]}}},
        {"name": "c", "contracts": [{"state_dtype": "fp16"}]},
    ]
    c = read(parts=parts)
    variants = [Variant("recurrent", f"r{i}", {"ilp": i}) for i in (4, 2, 1)]
    tried = {x.state_dtype: [v.id for v in c.admitted(x, variants)] for x in c.all_contracts()}
    assert tried == {"bf16": ["r1"], "fp32": ["r4", "r1"], "fp16": ["r4", "r2", "r1"]}
    assert c.admitted(Contract(tokens=9), variants) == ()


def test_shipped_parts_can_all_be_swept():
    """Each contract of shipped.yaml has variants and a floor on an H100, in each part; the whole
    models' cells are all there, but for T=6 and 7.
    """
    c, device = config.load(CONFIGS / "shipped.yaml"), arch.target("sm_90a")
    for part in c.parts:
        plan = sweep_plan(c.only([part.name]), device)
        for contract in plan.tried:
            decode, floor = plan.tried[contract], plan.floors[contract]
            assert len(decode) >= 8, (part.name, contract.key())
            assert floor, (part.name, contract.key())
    cells = set(c.problems())
    models = {
        p
        for name in ("qwen3.5-397b-a17b", "kimi-linear-48b-a3b")
        for p in config.load(CONFIGS / f"{name}.yaml").problems()
    }
    assert {p.contract.tokens for p in models - cells} == {6, 7}
    assert len(cells - models) <= 600


def test_shipped_covers_what_engines_ask_for():
    """Every state dtype, layout, mode and way for intermediate states of decode stands in
    shipped.yaml, KDA and OLMo's sizes too.
    """
    found = config.load(CONFIGS / "shipped.yaml").all_contracts()
    for values in (
        {"op": "gdn_decode", "state_dtype": "fp16"},
        {"layout": "v_last", "pool": False, "gate": "log"},
        {"intermediate": "slots", "accepted": True, "ragged": True, "mode": "frozen"},
        {"intermediate": "dense", "mode": "frozen"},
        {"intermediate": "indexed", "mode": "frozen", "ragged": True},
        {"intermediate": "none", "mode": "frozen"},
        {"K": 96, "V": 192, "beta": "given"},
        {"op": "kda_decode", "gate": "softplus", "state_dtype": "bf16"},
        {"op": "kda_decode", "gate": "log", "state_dtype": "fp32"},
    ):
        assert any(all(getattr(c, k) == v for k, v in values.items()) for c in found), values
