"""flash-linear-attention's and FlashInfer's calls, answered by gdntune."""

import torch

from gdntune.engines.fla import fused_recurrent_gated_delta_rule
from gdntune.engines.flashinfer import gated_delta_rule_mtp

B, T, H, HV, K, V = 2, 40, 4, 8, 128, 128
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).bfloat16()


q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
output, state = fused_recurrent_gated_delta_rule(
    q, k, v, g=-normal(B, T, HV).abs(), beta=normal(B, T, HV).sigmoid(),
    output_final_state=True, use_qk_l2norm_in_kernel=True,
)  # fmt: skip
print("fla", list(output.shape), list(state.shape), state.dtype)

pool = torch.randn(8, HV, V, K, generator=generator)
output, _ = gated_delta_rule_mtp(
    q[:, :4], k[:, :4], v[:, :4], pool, torch.tensor([6, 1]), torch.rand(HV, generator=generator),
    normal(B, 4, HV), normal(HV), normal(B, 4, HV), disable_state_update=True,
)  # fmt: skip
print("FlashInfer", list(output.shape), output.dtype)
