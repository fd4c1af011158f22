"""gdntune/config.py: what a config file may say, and what it is told where it may not."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gdntune.device import arch
from gdntune.errors import ConfigError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, contract_fault, problem_fault
from gdntune.results import table
from gdntune.tuning import config
from gdntune.tuning.plan import sweep_plan

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
SMALL = {
    "name": "small",
    "model": {"H": 4, "HV": 8},
    "batch": [1, 2],
    "contracts": [{"op": "gdn_decode"}],
}


def read(**changes):
    """The small config with some keys changed; None takes a key out."""
    return config.parse(
        yaml.safe_dump({k: v for k, v in {**SMALL, **changes}.items() if v is not None}),
        "small.yaml",
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_are_legal(path):
    """Every file in configs/ loads, is named as its file, and gives legal, distinct, sorted cells."""
    c = config.load(path)
    problems = c.problems()
    assert c.name == path.stem
    assert [problem_fault(p) for p in problems if problem_fault(p)] == []
    keys = [(p.contract, p.work_units) for p in problems]
    assert keys == sorted(set(keys))


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


REFUSED = {
    "unknown key": ({"shard": [1]}, "$", "`shard` (did you mean `shards`?)", "name, model, batch"),
    "unknown nested key": (
        {"search": {"keeps": 3}},
        "$.search",
        "`keeps` (did you mean `keep`?)",
        "screen_rounds, keep",
    ),
    "unknown contract key": (
        {"contracts": [{"dtype": "x"}]},
        "$.contracts[0]",
        "`dtype`",
        "op, layout, input_dtype",
    ),
    "missing key": ({"model": {"H": 4}}, "$.model", "lacks the key `HV`", "H, HV, K, V"),
    "enum": (
        {"contracts": [{"state_dtype": "bf15"}]},
        "$.contracts[0].state_dtype",
        "'bf15' (did you mean `bf16`?)",
        "bf16, fp16, fp32",
    ),
    "enum of another type": ({"device": 3}, "$.device", "3", "auto, cpu, cuda"),
    "boolean for an integer": ({"batch": [1, True]}, "$.batch[1]", "True", "an integer"),
    "fraction for an integer": ({"batch": [1.0]}, "$.batch[0]", "1.0", "an integer"),
    "text for a list": ({"batch": "1"}, "$.batch", "'1'", "a list"),
    "empty list": ({"batch": []}, "$.batch", "[]", "length >= 1"),
    "B=0": ({"batch": [0]}, "$.batch[0]", "0", ">= 1"),
    "T=0": ({"tokens": [1, 0]}, "$.tokens[1]", "0", ">= 1"),
    "T=17": ({"tokens": [17]}, "$.tokens[0]", "17", "<= 16"),
    "HV not a multiple of H": ({"model": {"H": 3, "HV": 8}}, "$.model.HV", "HV=8", "H=3"),
    "more shards than heads": ({"shards": [1, 8]}, "$.shards[1]", "less than one", "1, 2, 4"),
    "shards that cut a head": ({"shards": [3]}, "$.shards[0]", "a fraction", "1, 2, 4"),
    "no model": (
        {"model": None},
        "$",
        "lacks the key `model`",
        "at the top, or in each of its `parts`",
    ),
    "no batch": (
        {"batch": None},
        "$",
        "lacks the key `batch`",
        "at the top, or in each of its `parts`",
    ),
    "no parts": ({"parts": []}, "$.parts", "[]", "length >= 1"),
    "part without a name": (
        {"parts": [{}]},
        "$.parts[0]",
        "lacks the key `name`",
        "name, model, batch",
    ),
    "K": ({"model": {"H": 4, "HV": 8, "K": 100}}, "$.model.K", "K=100", "64, 96, 128, 256"),
    "V": ({"model": {"H": 4, "HV": 8, "V": 33}}, "$.model.V", "V=33", "multiples of 32"),
    "gate of the other op": (
        {"contracts": [{"op": "kda_decode"}]},
        "$.contracts[0]",
        "gate='raw'",
        "log, softplus",
    ),
    "tokens in a contract": (
        {"contracts": [{"tokens": 2}]},
        "$.contracts[0].tokens",
        "2",
        "$.tokens",
    ),
    "K in a contract": ({"contracts": [{}, {"K": 64}]}, "$.contracts[1].K", "64", "$.model.K"),
    "knob values": (
        {"kernels": {"recurrent": {"tile_v": 8}}},
        "$.kernels.recurrent.tile_v",
        "8",
        "a list",
    ),
    "no knob values": (
        {"kernels": {"recurrent": {"tile_v": []}}},
        "$.kernels.recurrent.tile_v",
        "[]",
        "length >= 1",
    ),
    "key that is no text": ({"kernels": {1: {}}}, "$.kernels", "the key 1", "text"),
    "infinite time": (
        {"search": {"max_cell_seconds": float("inf")}},
        "$.search.max_cell_seconds",
        "inf",
        "<= 86400",
    ),
    "time that is no number": (
        {"search": {"regret": float("nan")}},
        "$.search.regret",
        "nan",
        ">= 0",
    ),
    "name": ({"name": "a b"}, "$.name", "'a b'", "regex"),
    "policy": (
        {"policy": {"l2": "cold"}},
        "$.policy.l2",
        "'cold'",
        "cold-clean, cold-dirty, rotate, warm",
    ),
}


# The last of the parts, the path, what stood there, what is expected. The first part has nothing of
# its own.
REFUSED_PARTS = {
    "unknown key": (
        {"shard": [1]},
        "$.parts[1]",
        "`shard` (did you mean `shards`?)",
        "name, model, batch",
    ),
    "policy": ({"policy": {"l2": "warm"}}, "$.parts[1]", "`policy`", "kernels"),
    "parts in a part": ({"parts": [{"name": "c"}]}, "$.parts[1]", "`parts`", "name, model, batch"),
    "value": ({"tokens": [0]}, "$.parts[1].tokens[0]", "0", ">= 1"),
    "no name": ({"name": None}, "$.parts[1]", "lacks the key `name`", "name, model, batch"),
    "name": ({"name": "B"}, "$.parts[1].name", "'B'", "regex"),
    "name of another": (
        {"name": "a"},
        "$.parts[1].name",
        "'a', as $.parts[0].name",
        "a name of its own",
    ),
    "model": ({"model": {"H": 3, "HV": 4}}, "$.parts[1].model.HV", "HV=4", "H=3"),
    "K": (
        {"model": {"H": 4, "HV": 8, "K": 100}},
        "$.parts[1].model.K",
        "K=100",
        "64, 96, 128, 256",
    ),
    "shards of its own": ({"shards": [8]}, "$.parts[1].shards[0]", "less than one", "1, 2, 4"),
    "shards of all": (
        {"model": {"H": 3, "HV": 3}},
        "$.shards[1]",
        "2 shards of H=3",
        "1, 3 (in $.parts[1], b)",
    ),
    "contract": (
        {"contracts": [{"op": "kda_decode"}]},
        "$.parts[1].contracts[0]",
        "gate='raw'",
        "log, softplus",
    ),
    "unknown contract key": (
        {"contracts": [{"dtype": "x"}]},
        "$.parts[1].contracts[0]",
        "`dtype`",
        "op, layout",
    ),
    "tokens in a contract": (
        {"contracts": [{"tokens": 2}]},
        "$.parts[1].contracts[0].tokens",
        "2",
        "$.parts[1].tokens",
    ),
    "V in a contract": (
        {"contracts": [{"V": 64}]},
        "$.parts[1].contracts[0].V",
        "64",
        "$.parts[1].model.V",
    ),
    "knob values": ({"kernels": {"x": {"y": []}}}, "$.parts[1].kernels.x.y", "[]", "length >= 1"),
}


@pytest.mark.parametrize(
    "changes, path, given_, accepted", REFUSED_PARTS.values(), ids=REFUSED_PARTS
)
def test_refused_parts(changes, path, given_, accepted):
    """A fault of a part is told with its place there; one of an inherited key with its place at the
    top, and the part.
    """
    part = {k: v for k, v in {"name": "b", **changes}.items() if v is not None}
    with pytest.raises(ConfigError) as e:
        read(shards=[1, 2], parts=[{"name": "a"}, part])
    message = str(e.value)
    assert message.startswith(f"small.yaml: {path}")
    assert message[len(f"small.yaml: {path}")] in " :"
    assert given_ in message
    assert accepted in message


def test_parts_lack_what_neither_they_nor_the_top_give():
    """A key that the top leaves out must stand in each part: the first without it is named."""
    parts = [{"name": "a", "batch": [1]}, {"name": "b"}]
    with pytest.raises(ConfigError, match=r"\$\.parts\[1\] lacks the key `batch`"):
        read(batch=None, parts=parts)
    parts[1]["batch"] = [4]
    assert [p.B for p in read(batch=None, parts=parts).problems()] == [1, 4]


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


@pytest.mark.parametrize("changes, path, given_, accepted", REFUSED.values(), ids=REFUSED)
def test_refused(changes, path, given_, accepted):
    """An illegal config is told the file, the path, what stood there and what is expected."""
    with pytest.raises(ConfigError) as e:
        read(**changes)
    message = str(e.value)
    assert message.startswith(f"small.yaml: {path}")
    assert message[len(f"small.yaml: {path}")] in " :"
    assert given_ in message
    assert accepted in message


@pytest.mark.parametrize(
    "text, where",
    [
        ("name: [1", "line 1, column 9"),
        ("name: x\nabout: y\nname: z", "line 3, column 1: the key `name` stands twice"),
        ("model: {H: 1,\n  HV: 1, H: 2}", "line 2, column 10: the key `H` stands twice"),
        ("name: x\n\tabout: y", "line 2, column 1"),
        ("name: x\nabout: \x07", "line 2, column 8"),
        ("a: !!python/object/apply:os.system [exit]", "line 1, column 4"),
        ("a: *b", "line 1, column 4: found undefined alias"),
    ],
)
def test_yaml_errors_name_the_place(text, where):
    """What is not YAML, or not its safe subset, is told its line and column; repeated keys are
    refused.
    """
    with pytest.raises(ConfigError, match="^c.yaml, line") as e:
        config.parse(text, "c.yaml")
    assert where in str(e.value)


@pytest.mark.parametrize(
    "data", [b"name: \xff", b"", b"a: 2020-13-45", b"&a [*a]", b"[" * 5000, b"\xef\xbb\xbf- 1"]
)
def test_other_bytes_are_config_errors(data):
    """No bytes bring up anything but a ConfigError."""
    with pytest.raises(ConfigError, match="^c.yaml"):
        config.parse(data, "c.yaml")


def test_merged_keys_are_not_repeated_ones():
    """A merge (`<<`) may be overridden: only what stands twice in the file is refused."""
    text = """
name: merged
model: {H: 1, HV: 1}
batch: [1]
contracts:
  - &first {state_dtype: fp32, gate: raw}
  - &second {<<: *first, state_dtype: bf16}
  - {<<: *second, gate: log}
"""
    assert [(c.state_dtype, c.gate) for c in config.parse(text).contracts] == [
        ("fp32", "raw"),
        ("bf16", "raw"),
        ("bf16", "log"),
    ]


yaml_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["bf16", "cuda", "warm"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*SMALL, "H", "HV", "K", "x", "parts"]) | st.integers(),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from(config.Config.__struct_fields__), yaml_like)
def test_any_value_of_any_key_is_read_or_refused(key, value):
    """A random value for a key gives a config whose cells are legal, or a ConfigError."""
    try:
        c = read(**{key: value})
    except ConfigError:
        return
    assert [contract_fault(k) for k in c.all_contracts() if contract_fault(k)] == []


def test_missing_file_names_a_near_one(tmp_path):
    """A file that is not there: the message has its path and the nearest name."""
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"quickstrat.yaml: No such file.*did you mean .*quickstart.yaml"
    ):
        config.load(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match="directory"):
        config.load(tmp_path)


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


def test_check_kernels_names_the_nearest():
    """A kernel or knob that is not there is refused with what is."""
    read(kernels={"recurrent": {"ilp": [1]}})
    with pytest.raises(
        ConfigError,
        match=r"\$.kernels has the unknown key `recurent` \(did you mean `recurrent`\?\)",
    ):
        read(kernels={"recurent": {}})
    with pytest.raises(
        ConfigError,
        match=r"\$.kernels.recurrent has the unknown key `tile`.*expected one of tile_v, ilp, vec",
    ):
        read(kernels={"recurrent": {"tile": [1]}})
    parts = [{"name": "a"}, {"name": "b", "kernels": {"recurrent": {"tile": [1]}}}]
    with pytest.raises(
        ConfigError, match=r"\$.parts\[1\].kernels.recurrent has the unknown key `tile`"
    ):
        read(parts=parts)


WRONG_VALUES = {
    "of no variant": (
        {"recurrent": {"lanes": [8, 7]}},
        r"recurrent.lanes lists 7, .*: expected one of 8, 16$",
    ),
    "of no launch": (
        {"recurrent": {"threads": [100]}},
        r"recurrent.threads lists 100, .*: expected one of 32, 64, 128, 256",
    ),
    "nothing": (
        {"recurrent": {"ilp": [0]}},
        r"recurrent.ilp lists 0, .*: expected one of 1, 2, 4, 8",
    ),
    "less than nothing": ({"recurrent": {"tile_v": [-8]}}, r"recurrent.tile_v lists -8, "),
    "of another type": (
        {"recurrent": {"early": [1]}},
        r"recurrent.early lists 1, .*: expected True",
    ),
    "of another layout": (
        {"recurrent": {"split": [2]}},
        r"recurrent.split lists 2, .*: expected 1",
    ),
    "of contracts with intermediate states": (
        {"cpu_recurrent": {"around": [True]}},
        r"cpu_recurrent.around lists True, ",
    ),
    "of a kernel that serves none": (
        {"wy": {"warps": [1]}},
        r"wy.warps lists 1, .*: wy serves none of the contracts, leave it",
    ),
}


@pytest.mark.parametrize("wanted, said", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_that_no_variant_can_have_is_refused(wanted, said):
    """Fault: a knob's value that no legal variant has at any contract was dropped without a word."""
    with pytest.raises(ConfigError, match=rf"^small: \$\.kernels\.{said}"):
        read(kernels=wanted)


def test_a_value_that_a_legal_variant_has_is_accepted():
    """A value is for any contract, also of another part that lists it; what is legal though never
    tried is no fault of a config.
    """
    read(kernels={"recurrent": {"threads": [512], "early": [False]}})
    read(kernels={"cpu_recurrent": {"vec": [4, 8, 16]}})
    shared = {"recurrent": {"heads": [True, False]}}
    parts = [{"name": "a"}, {"name": "b", "tokens": [4]}]
    read(kernels=shared, parts=parts)
    with pytest.raises(
        ConfigError,
        match=r"\$\.parts\[1\]\.kernels\.recurrent\.heads lists True, .*: expected False$",
    ):
        read(parts=[parts[0], {**parts[1], "kernels": shared}])


def test_shipped_parts_can_all_be_swept():
    """Each contract of shipped.yaml has variants and a floor on an H100, in each part; the whole
    models' cells are all there.
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
    assert models <= cells
    assert len(cells - models) <= 350


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
