"""A layer's decode step in one launch: convolution, gated delta rule, gated RMSNorm.

Runs on a GPU where torch finds one, else on the CPU:  python examples/layer.py
"""

import torch
from torch.nn.functional import silu

import gdntune

B, H, HV, K, V, SLOTS, WIDTH = 4, 4, 8, 128, 128, 16, 4
D = 2 * H * K + HV * V


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = dict(dtype=torch.bfloat16, device=device)
    A_log, dt_bias = torch.zeros(2, HV, device=device)
    norm_weight = torch.rand(V, device=device)
    conv_weight = torch.randn(D, WIDTH, **bf16) / 2
    pool = torch.randn(SLOTS, HV, V, K, **bf16)
    windows = torch.zeros(SLOTS, WIDTH, D, **bf16)  # rings: a row a token
    slots = torch.tensor([5, 1, 9, 3], dtype=torch.int32, device=device)
    past, again = torch.zeros(B, WIDTH, D, **bf16), pool.clone()

    for step in range(3):
        mixed_qkv = torch.randn(B, D, **bf16)  # q, k and v as in_proj leaves them
        a, b = torch.randn(2, B, HV, **bf16)
        z = torch.randn(B, HV, V, **bf16)  # the output's gate
        position = torch.full((B,), step % WIDTH, dtype=torch.int32, device=device)
        common = dict(A_log=A_log, dt_bias=dt_bias, initial_state_indices=slots)

        y = gdntune.gated_delta_rule_layer_decode(
            mixed_qkv, a, b, initial_state=pool, output_gate=z, norm_weight=norm_weight,
            conv_state=windows, conv_weight=conv_weight, conv_position=position, **common,
        )  # fmt: skip

        # The same apart: o is rounded to bf16 before the norm.
        past = torch.cat((past[:, 1:], mixed_qkv[:, None]), 1)
        x = silu((past.float() * conv_weight.float().T).sum(1)).bfloat16()
        o = gdntune.gated_delta_rule_packed_decode(x, a, b, initial_state=again, **common)
        o = o[:, 0].float()
        rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-6)
        apart = o * rstd * norm_weight * silu(z.float())

    print("output", list(y.shape), y.dtype)
    close = torch.allclose(y.float(), apart, rtol=2**-5, atol=2**-6)
    print("within bf16's rounding of the parts apart:", close)
    newest = windows[slots.long(), 2]
    print("the window's newest row is the token:", torch.equal(newest, mixed_qkv))


if __name__ == "__main__":
    main()
