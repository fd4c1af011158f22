"""Models' linear-attention layers: presets by name, and what a transformers config.json says.

Configs are made of them as text, so that a user can keep and change one.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gdntune.errors import ConfigError, listed
from gdntune.problem import Gate, Op
from gdntune.tuning.config import Config, Model

# Tensor-parallel sizes that servers use.
SHARDS = (1, 2, 4, 8, 16)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """The gated delta rule of a model. H, HV: q/k and value heads of the whole model; K, V: head
    sizes. layers: how many there are, 0 where it is not known.
    """

    name: str
    op: Op
    H: int
    HV: int
    K: int = 128
    V: int = 128
    gate: Gate = "raw"
    layers: int = 0

    @property
    def shards(self) -> tuple[int, ...]:
        """The tensor-parallel sizes that divide its heads."""
        return tuple(s for s in SHARDS if not self.H % s and not self.HV % s)


def _gdn(HV: int, *names: str) -> Iterator[LinearAttention]:
    yield from (LinearAttention(name, "gdn_decode", 16, HV) for name in names)


# From each model's published config.json.
PRESETS: dict[str, LinearAttention] = {
    m.name: m
    for m in (
        *_gdn(16, "qwen3.5-0.8b", "qwen3.5-2b"),
        *_gdn(32, "qwen3-next-80b-a3b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-35b-a3b"),
        *_gdn(48, "qwen3.5-27b", "qwen3.8-27b"),
        *_gdn(64, "qwen3.5-122b-a10b", "qwen3.5-397b-a17b"),
        LinearAttention("olmo-hybrid-7b", "gdn_decode", 30, 30, 96, 192, "log"),
        LinearAttention("kimi-linear-48b-a3b", "kda_decode", 32, 32, gate="softplus"),
        LinearAttention("kimi-k3", "kda_decode", 96, 96, gate="lower_bound", layers=69),
        LinearAttention("ling-3.0", "kda_decode", 32, 32, gate="lower_bound"),
    )
}


def config_text(model: LinearAttention, about: str = "") -> str:
    """A config for a model: its heads at every tensor-parallel size, plain decode and four drafts,
    bf16 and fp32 states.
    """
    base = f"op: {model.op}, gate: {model.gate}"
    # OLMo-Hybrid's engines compute decay and beta before the kernel, both in fp32
    if model.gate == "log":
        base += ", gate_dtype: fp32, beta_dtype: fp32, beta: given"
    layers = f", {model.layers} layers" if model.layers else ""
    return f"""\
name: {model.name}
about: {about or f"{model.name}, {model.op}{layers}"}
device: auto
model: {{H: {model.H}, HV: {model.HV}, K: {model.K}, V: {model.V}}}    # of the whole model
shards: {list(model.shards)}    # tensor-parallel sizes: size s has H/s and HV/s heads
batch: {list(BATCH)}
tokens: [1, 4]    # 4: drafts to verify
contracts:
  - {{{base}, state_dtype: bf16}}
  - {{{base}, state_dtype: fp32}}
policy: {{timer: auto, l2: cold-clean}}
search: {{screen_rounds: 5, keep: 4, final_rounds: 120, max_cell_seconds: 30}}
"""


def read_hf(path: Path) -> LinearAttention:
    """What a transformers config.json, or the folder that has one, says of a model's linear
    attention; ConfigError where it says nothing of one.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{file}: {getattr(e, 'strerror', None) or e}; expected a model's config.json"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: expected a JSON object, as transformers writes it")
    # The folder's name is the model's, as a checkout has it; the file's own is always the same.
    name = path.resolve().name if path.is_dir() else file.resolve().parent.name
    found = from_hf(document, str(file))
    return dataclasses.replace(found, name=_slug(name) or found.name)


def _slug(name: str) -> str:
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name.lower()
    ).strip("._-")


def from_hf(document: Mapping[str, Any], source: str) -> LinearAttention:
    """The linear attention of a config.json: GDN by its `linear_num_*_heads` (Qwen3-Next, Qwen3.5,
    OLMo-Hybrid), KDA by `linear_attn_config` or `linear_num_heads` (Kimi, GLM), or as Ling has it.
    """
    text = document.get("text_config")
    if isinstance(text, dict):
        # Vision models keep the language model's keys one level down.
        document = {**document, **text}
    kind = _slug(str(document.get("model_type") or "model")).replace("_", "-")
    layers = _layers(document)
    if _number(document, "linear_num_key_heads") or kind.startswith("olmo-hybrid"):
        return _gdn_of(document, kind, layers)
    linear = document.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    heads = _number(linear, "num_heads") or _number(document, "linear_num_heads")
    size = _number(linear, "head_dim") or _number(document, "linear_head_dim") or 128
    bound = linear.get("gate_lower_bound", document.get("linear_lower_bound"))
    # Ling: KDA with the heads of its attention.
    if kind.startswith("bailing"):
        heads = heads or _number(document, "num_attention_heads")
        bound = (
            document.get("kda_lower_bound", -5.0) if document.get("kda_safe_gate", True) else None
        )
    if not heads:
        raise ConfigError(
            f"{source}: model_type {document.get('model_type')!r} names no gated delta rule:"
            " expected linear_num_key_heads (GDN), or linear_attn_config or linear_num_heads (KDA),"
            f" at the top or in text_config; presets are {listed(PRESETS)}"
        )
    if bound is not None and (not isinstance(bound, int | float) or isinstance(bound, bool)):
        raise ConfigError(f"{source}: the gate's lower bound is {bound!r}: expected a number")
    gate: Gate = "softplus" if bound is None else "lower_bound"
    return LinearAttention(kind, "kda_decode", heads, heads, size, size, gate, layers)


def _gdn_of(document: Mapping[str, Any], kind: str, layers: int) -> LinearAttention:
    everywhere = _number(document, "num_attention_heads")
    H = _number(document, "linear_num_key_heads") or everywhere
    HV = _number(document, "linear_num_value_heads") or everywhere
    if kind.startswith("olmo-hybrid"):
        # Their defaults, as the model's class has them.
        K = _number(document, "linear_key_head_dim") or 3 * _number(document, "hidden_size") // (
            4 * max(H, 1)
        )
        V = _number(document, "linear_value_head_dim") or 2 * K
        return LinearAttention(kind, "gdn_decode", H, HV, K, V, "log", layers)
    K = _number(document, "linear_key_head_dim") or 128
    V = _number(document, "linear_value_head_dim") or 128
    return LinearAttention(kind, "gdn_decode", H, HV, K, V, "raw", layers)


def _number(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    return value if type(value) is int and value > 0 else 0


def _layers(document: Mapping[str, Any]) -> int:
    types = document.get("layer_types")
    linear = document.get("linear_attn_config")
    if isinstance(types, list):
        return types.count("linear_attention")
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        return len(linear["kda_layers"])
    return 0


def overridden(
    config: Config,
    batch: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    heads: tuple[int, int] | None = None,
) -> Config:
    """A config with other batch sizes, tokens or heads (H and HV, without shards) in each of its
    parts, and a name that says so. What it held out and its workload were of other cells, and go.
    """
    changes: dict[str, Any] = {}
    labels = []
    if batch:
        changes["batch"] = batch
        labels.append("b" + "-".join(map(str, batch)))
    if tokens:
        changes["tokens"] = tokens
        labels.append("t" + "-".join(map(str, tokens)))
    if heads:
        labels.append(f"h{heads[0]}-{heads[1]}")
    if not labels:
        return config

    def changed(part: Any) -> Any:
        own = dict(changes)
        if heads:
            own |= {"model": Model(heads[0], heads[1], part.model.K, part.model.V), "shards": (1,)}
        return msgspec.structs.replace(part, **own)

    search = config.search
    if isinstance(search.held_out, tuple) and search.held_out:
        search = msgspec.structs.replace(search, held_out=0)
    search = msgspec.structs.replace(search, workload=None)
    made = msgspec.structs.replace(config, name=".".join([config.name, *labels]), search=search)
    if config.parts:
        return msgspec.structs.replace(made, parts=tuple(map(changed, config.parts)))
    return changed(made)
