"""What a config may not say, and how it is told: file, path, value, what is expected."""

import pytest
from config_files import SMALL, read
from hypothesis import given
from hypothesis import strategies as st

from gdntune.errors import ConfigError
from gdntune.problem import contract_fault
from gdntune.tuning import config

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
