"""Plain decode as vLLM and SGLang call it: q, k and v side by side in one row per request.

Runs on a GPU where torch finds one, else on the CPU:  python examples/packed.py
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
    A_log, dt_bias = torch.zeros(2, HV, device=device)
    pool = torch.randn(SLOTS, HV, V, K, **bf16)
    slots = torch.tensor([5, 1, 9, 0], device=device)  # slot 0 is padding here, as in vLLM
    output = torch.empty(B, 1, HV, V, **bf16)  # yours: nothing is allocated per call
    again = pool.clone()

    gdntune.gated_delta_rule_packed_decode(
        mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias,
        initial_state=pool, initial_state_indices=slots, output=output,
    )  # fmt: skip

    # The same through the general function, by views: nothing is copied.
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    same = gdntune.gated_delta_rule_decode(
        q.view(B, 1, H, K), k.view(B, 1, H, K), v.view(B, 1, HV, V),
        A_log=A_log, a=a[:, None], dt_bias=dt_bias, b=b[:, None],
        initial_state=again, initial_state_indices=slots, null_index=0,
    )  # fmt: skip

    print("output", list(output.shape), output.dtype)
    print("padding gives zeros:", not output[3].any().item())
    print("the same bits by views:", torch.equal(output, same) and torch.equal(pool, again))


if __name__ == "__main__":
    main()
