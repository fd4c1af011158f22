"""Models of transformers with random weights: tiny ones for tokens, small ones for times."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdntune.engines.transformers import GDN_STEP, KDA_STEP


class Size(NamedTuple):
    """Of a model: layers, hidden size, attention heads, q/k and value heads of its linear layers
    and their size, vocabulary.
    """

    layers: int
    hidden: int
    heads: int
    H: int
    HV: int
    K: int
    vocabulary: int


TINY = Size(layers=2, hidden=64, heads=2, H=2, HV=4, K=64, vocabulary=97)
# the linear layers of Qwen3.5 4B to 35B, in a model that is built in seconds
SMALL = Size(layers=12, hidden=1024, heads=8, H=16, HV=32, K=128, vocabulary=2048)


def _common(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.heads // 2,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
        # the first linear, the last not: one of each even in two layers
        "layer_types": [
            "linear_attention" if i < size.layers - 1 and (i + 1) % 4 else "full_attention"
            for i in range(size.layers)
        ],
    }  # fmt: skip


def _gdn(size: Size) -> dict[str, Any]:
    return {
        "linear_key_head_dim": size.K, "linear_value_head_dim": size.K,
        "linear_num_key_heads": size.H, "linear_num_value_heads": size.HV,
        "linear_conv_kernel_dim": 4, "head_dim": size.hidden // size.heads,
    }  # fmt: skip


def qwen3_next(size: Size) -> Any:
    """A Qwen3-Next: GDN with grouped heads, and experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden // 2,
        "shared_expert_intermediate_size": size.hidden // 2,
    }  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_common(size), **_gdn(size), **experts))


def qwen3_5(size: Size) -> Any:
    """A Qwen3.5: GDN with grouped heads."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_common(size), **_gdn(size)))


def kimi_linear(size: Size) -> Any:
    """A Kimi-Linear: KDA."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    attention = {
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden // 2,
        "n_group": 1, "kv_lora_rank": size.hidden // 2, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32, "linear_head_dim": size.K,
        "linear_num_heads": size.H, "num_key_value_heads": size.heads,
    }  # fmt: skip
    return KimiLinearForCausalLM(KimiLinearConfig(**{**_common(size), **attention}))


# How each is made, and the name of its step.
MODELS: dict[str, tuple[Callable[[Size], Any], str]] = {
    "qwen3_next": (qwen3_next, GDN_STEP),
    "qwen3_5": (qwen3_5, GDN_STEP),
    "kimi_linear": (kimi_linear, KDA_STEP),
}


def made(name: str, size: Size = TINY, device: str = "cpu", dtype: Any = torch.float32) -> Any:
    """A model of random weights, the same at every call."""
    torch.manual_seed(0)
    return MODELS[name][0](size).to(device, dtype).eval()


def generate(model: Any, tokens: int = 200, batch: int = 2, **options: Any) -> torch.Tensor:
    """Greedy tokens [batch, 7 + tokens] after a prompt of 7."""
    prompt = torch.arange(1, 1 + 7 * batch, device=model.device).reshape(batch, 7)
    return model.generate(
        prompt % model.config.vocab_size, max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
