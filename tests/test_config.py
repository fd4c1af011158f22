"""gdntune/config.py: what a config file may say, and what it is told where it may not."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gdntune import config
from gdntune.errors import ConfigError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, contract_fault, problem_fault

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
SMALL = {"name": "small", "model": {"H": 4, "HV": 8}, "batch": [1, 2], "contracts": [{"op": "gdn_decode"}]}


def read(**changes):
    """The small config with some keys changed; None takes a key out."""
    return config.parse(yaml.safe_dump({k: v for k, v in {**SMALL, **changes}.items() if v is not None}), "small.yaml")


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
    """Each (shard, power-of-two batch) of a model has a cell at its work units, in 13 to 20 cells a contract."""
    c = config.load(CONFIGS / f"{name}.yaml")
    units = {p.work_units for p in c.problems()}
    assert {b * heads // s for b in (2**i for i in range(10)) for s in (1, 2, 4, 8)} <= units
    assert 13 <= len(units) <= 20
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
    c = read(model={"H": 1, "HV": 1, "K": 64, "V": 96}, tokens=[3, 1, 3], contracts=[{"state_dtype": "fp32"}] * 2)
    assert c.all_contracts() == tuple(Contract(tokens=t, K=64, V=96, state_dtype="fp32") for t in (1, 3))


def test_defaults():
    """What is left out has the documented defaults."""
    c = read()
    assert (c.device, c.shards, c.tokens, c.kernels) == ("auto", (1,), (1,), {})
    assert (c.policy.timer, c.policy.l2) == ("auto", "cold-clean")
    assert c.search == config.Search(screen_rounds=6, keep=4, final_rounds=200, max_cell_seconds=60.0, regret=0.01)


REFUSED = {
    "unknown key": ({"shard": [1]}, "$", "`shard` (did you mean `shards`?)", "name, model, batch"),
    "unknown nested key": (
        {"search": {"keeps": 3}},
        "$.search",
        "`keeps` (did you mean `keep`?)",
        "screen_rounds, keep",
    ),
    "unknown contract key": ({"contracts": [{"dtype": "x"}]}, "$.contracts[0]", "`dtype`", "op, layout, input_dtype"),
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
    "K": ({"model": {"H": 4, "HV": 8, "K": 100}}, "$.model.K", "K=100", "64, 96, 128, 256"),
    "V": ({"model": {"H": 4, "HV": 8, "V": 33}}, "$.model.V", "V=33", "multiples of 32"),
    "gate of the other op": ({"contracts": [{"op": "kda_decode"}]}, "$.contracts[0]", "gate='raw'", "log, softplus"),
    "tokens in a contract": ({"contracts": [{"tokens": 2}]}, "$.contracts[0].tokens", "2", "$.tokens"),
    "K in a contract": ({"contracts": [{}, {"K": 64}]}, "$.contracts[1].K", "64", "$.model.K"),
    "knob values": ({"kernels": {"recurrent": {"tile_v": 8}}}, "$.kernels.recurrent.tile_v", "8", "a list"),
    "no knob values": ({"kernels": {"recurrent": {"tile_v": []}}}, "$.kernels.recurrent.tile_v", "[]", "length >= 1"),
    "key that is no text": ({"kernels": {1: {}}}, "$.kernels", "the key 1", "text"),
    "infinite time": ({"search": {"max_cell_seconds": float("inf")}}, "$.search.max_cell_seconds", "inf", "<= 86400"),
    "time that is no number": ({"search": {"regret": float("nan")}}, "$.search.regret", "nan", ">= 0"),
    "name": ({"name": "a b"}, "$.name", "'a b'", "regex"),
    "policy": ({"policy": {"l2": "cold"}}, "$.policy.l2", "'cold'", "cold-clean, cold-dirty, rotate, warm"),
}


@pytest.mark.parametrize("changes, path, given_, accepted", REFUSED.values(), ids=REFUSED)
def test_refused(changes, path, given_, accepted):
    """An illegal config is told the file, the path, what stood there and what is accepted."""
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
    """What is not YAML, or not its safe subset, is told its line and column; repeated keys are refused."""
    with pytest.raises(ConfigError, match="^c.yaml, line") as e:
        config.parse(text, "c.yaml")
    assert where in str(e.value)


@pytest.mark.parametrize("data", [b"name: \xff", b"", b"a: 2020-13-45", b"&a [*a]", b"[" * 5000, b"\xef\xbb\xbf- 1"])
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
        | st.dictionaries(st.sampled_from([*SMALL, "H", "HV", "K", "x"]) | st.integers(), inner, max_size=3)
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
    with pytest.raises(ConfigError, match=r"quickstrat.yaml: No such file.*did you mean .*quickstart.yaml"):
        config.load(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match="directory"):
        config.load(tmp_path)


def test_sha256_covers_what_decides_the_sweep():
    """Comments, key order, `about` and written-out defaults leave the hash alone; anything else changes it."""
    base = read()
    assert read(about="words", device="auto", tokens=[1]).sha256 == base.sha256
    others = [read(batch=[1]), read(search={"keep": 5}), read(policy={"l2": "warm"}), read(kernels={"recurrent": {}})]
    assert len({base.sha256, *(c.sha256 for c in others)}) == 5


def test_kernels_restrict_variants():
    """`kernels` leaves the named kernels, and of each the listed values; True is not 1."""
    c = read(kernels={"recurrent": {"tile_v": [16, 32], "wide": [True]}})
    variant = Variant("recurrent", "r", {"tile_v": 16, "ilp": 4, "wide": True})
    assert c.admits(variant)
    assert not c.admits(msgspec.structs.replace(variant, kernel="other"))
    for change in ({"tile_v": 64}, {"wide": 1}, {"wide": False}):
        assert not c.admits(msgspec.structs.replace(variant, knobs={**variant.knobs, **change}))
    assert read().admits(variant)


def test_check_kernels_names_the_nearest():
    """A kernel or knob that is not there is refused with what is."""
    known = {"recurrent": ("tile_v", "ilp")}
    read(kernels={"recurrent": {"ilp": [1]}}).check_kernels(known)
    with pytest.raises(ConfigError, match=r"\$.kernels has the unknown key `recurent` \(did you mean `recurrent`\?\)"):
        read(kernels={"recurent": {}}).check_kernels(known)
    with pytest.raises(ConfigError, match=r"\$.kernels.recurrent has the unknown key `tile`.*accepted are tile_v, ilp"):
        read(kernels={"recurrent": {"tile": [1]}}).check_kernels(known)
