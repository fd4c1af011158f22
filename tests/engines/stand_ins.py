"""Packages named vllm and sglang with the functions that we replace, made from the record of their
signatures: what they compute is in theirs.py.
"""

import ast
import contextlib
import sys
from pathlib import Path

import signatures

_QWEN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_OPS = "vllm/third_party/flash_linear_attention/ops"
_K3 = "vllm/models/kimi_k3/nvidia/ops/third_party/kda"
# Which defined functions each module holds.
_HOLDS = {
    _QWEN: [
        f"{_OPS}/fused_recurrent.py:fused_recurrent_gated_delta_rule_packed_decode",
        f"{_OPS}/fused_sigmoid_gating.py:fused_sigmoid_gating_delta_rule_update",
        "vllm/_custom_ops.py:fused_gdn_decode_post_conv_mtp",
    ],
    "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": [
        f"{_OPS}/fused_recurrent.py:fused_recurrent_gated_delta_rule",
    ],
    f"{_K3}/__init__.py": [
        f"{_K3}/fused_recurrent.py:fused_recurrent_kda",
        f"{_K3}/fused_recurrent.py:fused_recurrent_kda_packed_decode",
    ],
    "vllm/model_executor/models/bailing_moe_v3.py": [f"{_OPS}/kda.py:fused_recurrent_kda"],
}
# How the layer of vLLM 0.33 calls them: by these names and keywords.
_LAYER = '''

def fused_mtp_decode_impl():
    return fused_gdn_decode_post_conv_mtp


class QwenGatedDeltaNetAttention:
    """The calls of its decode steps, after the convolution."""

    def __init__(self, A_log, dt_bias, norm_weight, pool):
        self.A_log, self.dt_bias, self.norm_weight, self.pool = A_log, dt_bias, norm_weight, pool

    def decode(self, mixed_qkv, a, b, slots, out):
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed_qkv, a=a, b=b, A_log=self.A_log, dt_bias=self.dt_bias,
            scale=self.pool.shape[3] ** -0.5, initial_state=self.pool, out=out.unsqueeze(1),
            ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
        )

    def drafts(self, mixed_qkv, a, b, slots, cu_seqlens, accepted, output_gate, out):
        fused_mtp_decode_impl()(
            mixed_qkv=mixed_qkv, a=a, b=b, A_log=self.A_log, dt_bias=self.dt_bias,
            state_indices=slots, cu_seqlens=cu_seqlens, num_accepted_tokens=accepted,
            state=self.pool, output_gate=output_gate, norm_weight=self.norm_weight, out=out,
            scale=self.pool.shape[3] ** -0.5, norm_eps=1e-6, output_gate_activation="silu",
        )
'''


def _function(name: str, signature: str) -> str:
    return f"def {name}{signature}:\n    return theirs.call({name!r}, locals())\n"


def write_vllm(folder: Path) -> None:
    """A package vllm below a folder."""
    record = signatures.recorded()["defined"]
    for file, names in _HOLDS.items():
        functions = [_function(n.split(":")[1], record[n]) for n in names]
        text = "import theirs\n\n\n" + "\n\n".join(functions)
        _write(folder / file, text + (_LAYER if file == _QWEN else ""))
    _packages(folder / "vllm")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _packages(root: Path) -> None:
    for folder in (root, *(p for p in root.rglob("*") if p.is_dir())):
        (folder / "__init__.py").touch()


@contextlib.contextmanager
def importable(folder: Path, package: str):
    """A package of a folder is what an import of that name finds, and afterwards is forgotten."""

    def ours(name):
        return name == package or name.startswith(f"{package}.")

    before = {name: m for name, m in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if ours(n)]:
            del sys.modules[name]
        sys.modules.update(before)


_LINEAR = "sglang/srt/layers/attention/linear"
_BACKENDS = """import enum


class LinearAttnKernelBackend(enum.Enum):
    TRITON, FLASHINFER, CUSTOM = "triton", "flashinfer", "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_triton(self):
        return self is LinearAttnKernelBackend.TRITON

    def is_custom(self):
        return self is LinearAttnKernelBackend.CUSTOM
"""
_DISPATCHER = '''

class Other:
    """A kernel that was chosen explicitly."""


class {OP}KernelDispatcher:
    def __init__{signature}:
        self.triton_kernel = self.tree_verify_kernel = Triton{OP}Kernel()
        if decode_backend.is_custom():
            raise ValueError(f"Unsupported decode backend: {{decode_backend}}")
        self.decode_kernel = self.triton_kernel if decode_backend.is_triton() else Other()
        verified = verify_backend is None or verify_backend.is_triton()
        self.verify_kernel = self.triton_kernel if verified else Other()
        self.extend_kernel = self.triton_kernel
        self.supports_packed_decode = getattr(self.decode_kernel, "supports_packed_decode", False)

    def decode(self, q, k, v, a, b, **kwargs):
        return self.decode_kernel.decode(q, k, v, a, b, **kwargs)

    def packed_decode(self, mixed_qkv, a, b, **kwargs):
        return self.decode_kernel.packed_decode(mixed_qkv, a, b, **kwargs)

    def target_verify(self, **kwargs):
        tree = kwargs.get("retrieve_parent_token") is not None
        return (self.tree_verify_kernel if tree else self.verify_kernel).target_verify(**kwargs)
'''
_HOOKS = """import collections
import enum
import functools
import pkgutil

HookType = enum.Enum("HookType", "BEFORE AFTER AROUND REPLACE")


class HookRegistry:
    _hooks = collections.defaultdict(list)
    _patched = set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            cls._patched.add(target)
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            for hook_type, hook, _ in hooks:
                assert hook_type is HookType.AROUND
                bound = functools.partial(hook, getattr(owner, name))
                setattr(owner, name, lambda *args, _f=bound, **kwargs: _f(*args, **kwargs))
"""
_CHOICES = """LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton", "flashinfer"]
add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
"""


def write_sglang(folder: Path, real: Path | None = None) -> None:
    """A package sglang below a folder. real: an unpacked wheel, whose registry of hooks, backends
    and dispatchers are taken as they stand; the kernels are stand-ins.
    """
    record = signatures.recorded()["defined"]
    for op in ("gdn", "kda"):
        OP = op.upper()
        file = f"{_LINEAR}/kernels/{op}_triton.py"
        methods = "".join(
            f"\n    def {name}{record[f'{file}:Triton{OP}Kernel.{name}']}:\n"
            f"        return theirs.sglang({name!r}, {op == 'kda'}, locals())\n"
            for name in ("decode", "packed_decode", "target_verify")
        )
        kernel = f"class Triton{OP}Kernel:\n    supports_packed_decode = True\n{methods}"
        _write(folder / file, f"import theirs\n\n\n{kernel}")
        backend = f"{_LINEAR}/{op}_backend.py"
        text = f"from {_LINEAR.replace('/', '.')}.kernels.{op}_triton import Triton{OP}Kernel\n"
        if real is None:
            init = record[f"{backend}:{OP}KernelDispatcher.__init__"]
            text += _DISPATCHER.format(OP=OP, signature=init)
        else:
            text += _real_class(real / backend, f"{OP}KernelDispatcher")
        _write(folder / backend, text)
    for path, text in (
        (f"{_LINEAR}/utils.py", _BACKENDS),
        ("sglang/srt/plugins/hook_registry.py", _HOOKS),
        ("sglang/srt/arg_groups/choices.py", _CHOICES),
    ):
        if real is not None:
            text = (real / path).read_text()
            if path.endswith("utils.py"):
                text = _real_class(real / path, "LinearAttnKernelBackend")
        _write(folder / path, text)
    _packages(folder / "sglang")


def _real_class(file: Path, name: str) -> str:
    """A class of theirs by itself, with what it names beside kernels."""
    text = file.read_text()
    node = next(n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    return (
        "from enum import Enum\nfrom typing import Any, Optional\n\nimport torch\n\n"
        "LinearAttnKernelBackend = Any\n\n\ndef rank0_log(text):\n    pass\n\n\n"
        f"{ast.get_source_segment(text, node)}\n"
    )
