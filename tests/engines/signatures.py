"""The signatures of the engines' functions that we stand in for, as facts beside their versions.

`python tests/engines/signatures.py FOLDER...` reads them out of unpacked wheels (nothing of theirs is
imported) and writes signatures.json; test_signatures.py compares ours and the stand-ins with it.
"""

import ast
import json
import sys
from pathlib import Path

RECORD = Path(__file__).parent / "signatures.json"
_V, _S = "vllm/third_party/flash_linear_attention/ops", "sglang/srt/layers/attention/linear"
_F = "flashinfer"
# Where each name is defined.
DEFINED = {
    f"{_V}/fused_recurrent.py": [
        "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_gated_delta_rule",
    ],
    f"{_V}/fused_sigmoid_gating.py": ["fused_sigmoid_gating_delta_rule_update"],
    f"{_V}/kda.py": ["fused_recurrent_kda"],
    f"{_V}/layernorm_guard.py": ["layer_norm_fwd"],
    "vllm/model_executor/layers/mamba/ops/layernorm_gated.py": ["_layer_norm_fwd"],
    "vllm/_custom_ops.py": ["fused_gdn_decode_post_conv_mtp"],
    "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py": [
        "fused_recurrent_kda", "fused_recurrent_kda_packed_decode",
    ],
    "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": ["fused_mtp_decode_impl"],
    "vllm/plugins/__init__.py": ["load_general_plugins"],
    f"{_S}/kernels/gdn_triton.py": [
        "TritonGDNKernel.decode", "TritonGDNKernel.packed_decode", "TritonGDNKernel.target_verify",
    ],
    f"{_S}/kernels/kda_triton.py": [
        "TritonKDAKernel.decode", "TritonKDAKernel.packed_decode", "TritonKDAKernel.target_verify",
    ],
    f"{_S}/gdn_backend.py": ["GDNKernelDispatcher.__init__"],
    f"{_S}/kda_backend.py": ["KDAKernelDispatcher.__init__"],
    "sglang/srt/plugins/hook_registry.py": ["HookRegistry.register"],
    f"{_F}/gdn_decode.py": [
        "gated_delta_rule_decode_pretranspose", "gated_delta_rule_decode", "gated_delta_rule_mtp",
    ],
    "fla/ops/gated_delta_rule/fused_recurrent.py": ["fused_recurrent_gated_delta_rule"],
    "fla/ops/kda/fused_recurrent.py": ["fused_recurrent_kda"],
}  # fmt: skip
# Which modules hold which names by import: there they are replaced.
IMPORTED = {
    "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": [
        "fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update",
    ],
    "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": [
        "fused_recurrent_gated_delta_rule",
    ],
    "vllm/models/kimi_k3/nvidia/ops/third_party/kda/__init__.py": [
        "fused_recurrent_kda", "fused_recurrent_kda_packed_decode",
    ],
    "vllm/model_executor/models/bailing_moe_v3.py": ["fused_recurrent_kda"],
}  # fmt: skip
CONSTANTS = {"vllm/v1/attention/backends/utils.py": "NULL_BLOCK_ID"}
ENTRY_POINTS = {
    "vllm/plugins/__init__.py": "DEFAULT_PLUGINS_GROUP",
    "sglang/srt/plugins/__init__.py": "GENERAL_PLUGINS_GROUP",
}


def signature(function: ast.FunctionDef) -> str:
    """`(a, b=1, *, c)`: names, kinds and defaults, without annotations."""
    for a in ast.walk(function.args):
        if isinstance(a, ast.arg):
            a.annotation = None
    return f"({ast.unparse(function.args)})"


def defined(tree: ast.Module, name: str) -> ast.FunctionDef:
    """A function or method of a module."""
    body = tree.body
    for part in name.split("."):
        found = next(n for n in body if getattr(n, "name", None) == part)
        body = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef)
    return found


def imported(tree: ast.Module) -> set[str]:
    """The names that a module imports from others."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def value(tree: ast.Module, name: str) -> object:
    """A constant of a module."""
    return next(
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == name
    )


def read(folders: list[Path]) -> dict[str, dict]:
    """What the record holds, out of the folders that have the engines' packages."""
    found: dict[str, dict] = {"versions": {}, "defined": {}, "imported": {}, "constants": {}}

    def tree(file: str) -> ast.Module | None:
        there = next((f / file for f in folders if (f / file).exists()), None)
        return None if there is None else ast.parse(there.read_text())

    for folder in folders:
        for info in folder.glob("*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            if name in ("vllm", "sglang", "flashinfer_python", "fla_core"):
                found["versions"][name] = version
    for file, names in DEFINED.items():
        if (module := tree(file)) is not None:
            for name in names:
                found["defined"][f"{file}:{name}"] = signature(defined(module, name))
    for file, names in IMPORTED.items():
        if (module := tree(file)) is not None:
            found["imported"][file] = sorted(imported(module) & set(names))
    for file, name in {**CONSTANTS, **ENTRY_POINTS}.items():
        if (module := tree(file)) is not None:
            found["constants"][f"{file}:{name}"] = value(module, name)
    return found


def recorded() -> dict[str, dict]:
    """The record."""
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    RECORD.write_text(json.dumps(read([Path(f) for f in sys.argv[1:]]), indent=1) + "\n")
