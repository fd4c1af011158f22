"""A tiny Qwen3-Next of transformers generates with its own recurrent step, then with gdntune's."""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from gdntune.engines import transformers as hook

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, pad_token_id=0,
)  # fmt: skip
model = Qwen3NextForCausalLM(config).eval()
prompt = torch.arange(1, 15).reshape(2, 7)
options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False}

expected = model.generate(prompt, **options)
hook.enable()
tokens = model.generate(prompt, **options)
(step,) = (s for name, s in hook.replaced().items() if "qwen3_next." in name)
hook.disable()
print("the same tokens:", torch.equal(tokens, expected))
print("steps by gdntune:", step.counts.served, "- by transformers:", step.counts.passed_on)
