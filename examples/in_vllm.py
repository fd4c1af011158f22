"""What vLLM's layer calls with the plug-in on: its packed decode, and its drafts with the norm."""

import torch

from gdntune.engines import vllm

B, T, H, HV, K, V, slots = 3, 4, 4, 8, 128, 128, 16
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).bfloat16()


A_log, dt_bias = torch.rand(HV, generator=generator), normal(HV)
pool = normal(slots, HV, V, K)

# one token a request; block 0 is vLLM's null block, so the second request is padding
out = torch.empty(B, 1, HV, V, dtype=torch.bfloat16)
vllm.packed_decode(
    normal(B, 2 * H * K + HV * V), normal(B, HV), normal(B, HV), A_log, dt_bias, K**-0.5, pool,
    out, torch.tensor([3, 0, 5], dtype=torch.int32), True, null_index=0,
)  # fmt: skip
print("decode", list(out.shape), "- padding gives zeros:", bool((out[1] == 0).all()))

# four, two and three drafts, a slot a token, gated RMSNorm inside
rows = 4 + 2 + 3
drafts = vllm.post_conv_mtp(
    mixed_qkv=normal(rows, 2 * H * K + HV * V), a=normal(rows, HV), b=normal(rows, HV),
    A_log=A_log, dt_bias=dt_bias, state_indices=torch.arange(1, 13, dtype=torch.int32).view(B, T),
    cu_seqlens=torch.tensor([0, 4, 6, 9], dtype=torch.int32),
    num_accepted_tokens=torch.tensor([1, 3, 2], dtype=torch.int32), state=pool,
    output_gate=normal(rows, HV, V), norm_weight=normal(V), scale=K**-0.5, null_index=0,
)  # fmt: skip
print("drafts", list(drafts.shape), "- all finite:", bool(drafts.isfinite().all()))
