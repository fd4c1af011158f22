"""tuning/models.py: what a config.json says of a model, as transformers' classes write it; presets;
a config at other sizes.
"""

import json

import pytest
import transformers

from gdntune.errors import ConfigError
from gdntune.tuning import config
from gdntune.tuning.models import PRESETS, config_text, overridden, read_hf

NEXT = {"num_hidden_layers": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16}


def written(tmp_path, name, **fields):
    """The folder of a model with a config.json as the class of that name writes it."""
    folder = tmp_path / "Some-Model-3B"
    folder.mkdir(exist_ok=True)
    getattr(transformers, name)(**fields).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name, fields, expected",
    [
        ("Qwen3NextConfig", NEXT, ("gdn_decode", 16, 32, 128, 128, "raw", 3)),
        ("Qwen3_5TextConfig", NEXT, ("gdn_decode", 16, 32, 128, 128, "raw", 3)),
        (
            "Qwen3_5Config",
            {"text_config": {**NEXT, "linear_num_value_heads": 64}},
            ("gdn_decode", 16, 64, 128, 128, "raw", 3),
        ),
        (
            "OlmoHybridConfig",
            {"num_hidden_layers": 4, "num_attention_heads": 30, "hidden_size": 3840},
            ("gdn_decode", 30, 30, 96, 192, "log", 3),
        ),
        (
            "KimiLinearConfig",
            {"num_hidden_layers": 4},
            ("kda_decode", 32, 32, 128, 128, "softplus", None),
        ),
        (
            "Glm5NextConfig",
            {"num_hidden_layers": 4},
            ("kda_decode", 64, 64, 128, 128, "lower_bound", 3),
        ),
        (
            "BailingHybridConfig",
            {"num_hidden_layers": 6},
            ("kda_decode", 32, 32, 128, 128, "lower_bound", 5),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_config_json(tmp_path, name, fields, expected):
    """Heads, head sizes, gate and layers of each family, nested text_config included; the config
    that is made of it is valid and named after the folder.
    """
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    found = read_hf(written(tmp_path, name, **fields))
    assert (found.op, found.H, found.HV, found.K, found.V, found.gate) == expected[:6]
    assert expected[6] in (None, found.layers)
    assert found.name == "some-model-3b"
    made = config.parse(config_text(found))
    assert made.problems() and {p.contract.op for p in made.problems()} == {found.op}


def test_kimis_checkpoint(tmp_path):
    """linear_attn_config, as Kimi's checkpoints have it, with layers counted from 1."""
    linear = {"num_heads": 96, "head_dim": 128, "kda_layers": [1, 2, 3], "gate_lower_bound": -5.0}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "kimi_k3", "linear_attn_config": linear}))
    found = read_hf(file)
    assert (found.H, found.gate, found.layers) == (96, "lower_bound", 3)
    assert found.shards == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"model_type": "llama"}', "'llama' names no gated delta rule: expected linear_num_key"),
        ("[1]", "expected a JSON object"),
        ("{", "expected a model's config.json"),
        (
            '{"model_type": "kimi", "linear_attn_config": {"num_heads": [4]}}',
            "names no gated delta",
        ),
        (
            '{"linear_num_heads": 4, "linear_lower_bound": "x"}',
            "lower bound is 'x': expected a number",
        ),
        ("[" * 100_000, "expected a model's config.json"),
        (None, "No such file.*expected a model's config.json"),
    ],
)
def test_refused(tmp_path, text, said):
    """A file of another kind is one message that says what is expected. Faults: heads in a list, and
    brackets without end, were tracebacks; a bound that is no number was taken.
    """
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hf(tmp_path / "config.json")


def test_presets():
    """Every preset is a valid config whose shards divide its heads."""
    for model in PRESETS.values():
        assert config.parse(config_text(model)).name == model.name
        assert 1 in model.shards and all(model.HV % s == 0 for s in model.shards)


def test_overridden():
    """Batch, tokens and heads replace those of each part, and the name says so."""
    found = config.parse(
        "name: x\nmodel: {H: 2, HV: 4}\nbatch: [1]\ncontracts: [{}]\nshards: [1, 2]\n"
        "search: {held_out: [{batch: 2}]}\nparts: [{name: a}, {name: b, tokens: [2]}]"
    )
    made = overridden(found, (3, 5), (1,), (4, 8))
    assert made.name == "x.b3-5.t1.h4-8"
    assert {(p.B, p.H, p.HV, p.contract.tokens) for p in made.problems()} == {
        (3, 4, 8, 1), (5, 4, 8, 1),
    }  # fmt: skip
    assert overridden(found) is found
