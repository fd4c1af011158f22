"""A layer's decode behind its convolution: gated delta rule and gated RMSNorm in one launch.

Runs on a GPU where torch finds one, else on the CPU:  python examples/layer.py
"""

import torch

import gdntune

B, H, HV, K, V, SLOTS = 4, 4, 8, 128, 128, 16


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = dict(dtype=torch.bfloat16, device=device)
    mixed_qkv = torch.randn(B, 2 * H * K + HV * V, **bf16)  # what the convolution leaves
    a, b = torch.randn(2, B, HV, **bf16)
    z = torch.randn(B, HV, V, **bf16)  # the output's gate, as in_proj gives it
    A_log, dt_bias = torch.zeros(2, HV, device=device)
    weight = torch.rand(V, device=device)
    pool = torch.randn(SLOTS, HV, V, K, **bf16)
    slots = torch.tensor([5, 1, 9, 3], device=device)
    again = pool.clone()
    common = dict(A_log=A_log, dt_bias=dt_bias, initial_state_indices=slots)

    y = gdntune.gated_delta_rule_layer_decode(
        mixed_qkv, a, b, initial_state=pool, output_gate=z, norm_weight=weight, **common
    )

    # The same apart: o is rounded to bf16 before the norm.
    o = gdntune.gated_delta_rule_packed_decode(mixed_qkv, a, b, initial_state=again, **common)
    o = o[:, 0].float()
    rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-6)
    apart = o * rstd * weight * torch.nn.functional.silu(z.float())

    print("output", list(y.shape), y.dtype)
    close = torch.allclose(y.float(), apart, rtol=2**-6, atol=1e-3)
    print("within bf16's rounding of the norm apart:", close)
    print("the same states:", torch.equal(pool, again))


if __name__ == "__main__":
    main()
