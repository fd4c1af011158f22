"""Our functions take what the engines pass to theirs: held against the record of their signatures,
and the record against the engines' sources where these are at hand.
"""

import importlib.metadata
import inspect
import os
from pathlib import Path

import pytest
import signatures

from gdntune.engines import fla, flashinfer, sglang, vllm

ROOT = Path(__file__).parent.parent.parent
SOURCES = Path(os.environ.get("GDNTUNE_ENGINE_SOURCES", "none"))
RECORD = signatures.recorded()
_V, _S = signatures._V, signatures._S
_K3 = "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
OURS = {
    f"{_V}/fused_recurrent.py:fused_recurrent_gated_delta_rule_packed_decode": vllm.packed_decode,
    f"{_V}/fused_recurrent.py:fused_recurrent_gated_delta_rule": vllm.gdn_from_log_decay,
    f"{_V}/fused_sigmoid_gating.py:fused_sigmoid_gating_delta_rule_update": (
        vllm.sigmoid_gating_update
    ),
    f"{_V}/kda.py:fused_recurrent_kda": vllm.kda_from_log_decay,
    "vllm/_custom_ops.py:fused_gdn_decode_post_conv_mtp": vllm.post_conv_mtp,
    f"{_K3}:fused_recurrent_kda": vllm.kda_from_raw_gates,
    f"{_K3}:fused_recurrent_kda_packed_decode": vllm.kda_packed_decode,
    **{
        f"flashinfer/gdn_decode.py:{name}": getattr(flashinfer, name)
        for name in (
            "gated_delta_rule_decode_pretranspose",
            "gated_delta_rule_decode",
            "gated_delta_rule_mtp",
        )
    },
    "fla/ops/gated_delta_rule/fused_recurrent.py:fused_recurrent_gated_delta_rule": (
        fla.fused_recurrent_gated_delta_rule
    ),
    "fla/ops/kda/fused_recurrent.py:fused_recurrent_kda": fla.fused_recurrent_kda,
    f"{_S}/gdn_backend.py:GDNKernelDispatcher.__init__": sglang.built,
    f"{_S}/kda_backend.py:KDAKernelDispatcher.__init__": sglang.built,
    **{
        f"{_S}/kernels/{op}_triton.py:Triton{op.upper()}Kernel.{name}": getattr(sglang, name)
        for op in ("gdn", "kda")
        for name in ("decode", "packed_decode", "target_verify")
    },
}
# What ours takes beyond theirs: by the plug-in, or by SGLang's hook.
OWN = {"null_index", "kda", "gated_norm", "construct", "dispatcher"}
FREE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def parameters(signature: str) -> list[inspect.Parameter]:
    """The parameters of a recorded signature, without `self`."""
    scope: dict = {}
    exec(f"def f{signature}: pass", scope)  # noqa: S102 - a record of ours
    return [p for p in inspect.signature(scope["f"]).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("name", OURS)
def test_ours_takes_what_theirs_takes(name):
    """The same names in the same places with the same defaults, and any keyword where theirs takes
    any.
    """
    reference = parameters(RECORD["defined"][name])
    own = [p for p in inspect.signature(OURS[name]).parameters.values() if p.name not in OWN]
    assert [p.name for p in own if p.kind == p.POSITIONAL_OR_KEYWORD] == [
        p.name for p in reference if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in own)
    assert takes_any or not any(p.kind == p.VAR_KEYWORD for p in reference)
    there = {p.name: p for p in own}
    for p in reference:
        if p.kind not in FREE and p.name in there:
            # None where SGLang's KDA has no default: what is always given needs none
            assert there[p.name].default == p.default or name.endswith(
                "KDAKernelDispatcher.__init__"
            )
        elif p.kind not in FREE:
            assert takes_any, f"{p.name} cannot be passed"


def test_vllm_targets_are_what_modules_hold():
    """Each function is replaced in a module that holds its name by import or definition, and is
    known by parameters that it has.
    """
    held = {
        (file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), name)
        for file, names in RECORD["imported"].items()
        for name in names
    }
    held.add((vllm.QWEN, "fused_mtp_decode_impl"))
    assert {(t.module, t.attribute) for t in vllm.targets(0)} == held
    for target in vllm.targets(0):
        definitions = [
            {p.name for p in parameters(text)}
            for name, text in RECORD["defined"].items()
            if name.endswith(f":{target.attribute}") and name.startswith("vllm")
        ]
        assert any(set(target.parameters) <= names for names in definitions)


def test_conventions_and_entry_points():
    """vLLM's null block, and the groups under which this package is found as a plug-in."""
    constants = RECORD["constants"]
    assert constants["vllm/v1/attention/backends/utils.py:NULL_BLOCK_ID"] == vllm.NULL_INDEX
    groups = {
        constants["vllm/plugins/__init__.py:DEFAULT_PLUGINS_GROUP"]: vllm.plugin,
        constants["sglang/srt/plugins/__init__.py:GENERAL_PLUGINS_GROUP"]: sglang.plugin,
    }
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, function in groups.items():
        assert declared[group] == {"gdntune": f"{function.__module__}:{function.__name__}"}


def test_record_is_of_the_engines_kernels():
    """What there is of the engines' sources, perhaps their kernels alone: their signatures are the
    recorded ones.
    """
    if not SOURCES.exists():
        pytest.skip("no sources of engines: GDNTUNE_ENGINE_SOURCES names none")
    found = signatures.read([SOURCES])
    assert found["versions"].items() <= RECORD["versions"].items()
    assert found["defined"]
    assert found["defined"].items() <= RECORD["defined"].items()


def test_record_is_of_the_installed_fla():
    """flash-linear-attention's signatures are those of the installed version, where it is the
    recorded one.
    """
    pytest.importorskip("fla")
    if importlib.metadata.version("fla-core") != RECORD["versions"]["fla_core"]:
        pytest.skip("another version of fla-core is installed")
    folder = Path(importlib.metadata.distribution("fla-core").locate_file(""))
    found = signatures.read([folder])["defined"]
    assert {n for n in RECORD["defined"] if n.startswith("fla/")} <= found.keys()
    assert found.items() <= RECORD["defined"].items()


def test_record_is_of_unpacked_wheels():
    """Where the engines' wheels are unpacked, all of the record is theirs."""
    if not (SOURCES / "vllm" / "plugins").exists() or not (SOURCES / "sglang").exists():
        pytest.skip("no unpacked vllm and sglang: GDNTUNE_ENGINE_SOURCES names none")
    found = signatures.read([SOURCES])
    for part in ("defined", "imported", "constants"):
        expected = {n: x for n, x in RECORD[part].items() if n.startswith(("vllm", "sglang"))}
        assert expected.items() <= found[part].items()
