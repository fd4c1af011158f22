"""Gated DeltaNet, one token per request: states live in a pool of slots and are updated in place.

Runs on a GPU where torch finds one, else on the CPU:  python examples/decode.py
"""

import torch

import gdntune

B, T, H, HV, K, V, SLOTS = 4, 1, 4, 8, 128, 128, 16


def by_hand(q, k, v, a, b, A_log, dt_bias, state):
    """The formula for one token in fp64: the output [HV, V] and the new state [HV, V, K]."""
    q, k, v, a, b, A_log, dt_bias, state = (
        x.double() for x in (q, k, v, a, b, A_log, dt_bias, state)
    )
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (
        x.repeat_interleave(HV // H, dim=0) for x in (q, k)
    )  # GVA: HV / H value heads share one
    decay = torch.exp(-A_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    state = state * decay[:, None, None]
    error = v - torch.einsum("hvk,hk->hv", state, k)
    state = state + torch.einsum("hv,hk->hvk", error * b.sigmoid()[:, None], k)
    return torch.einsum("hvk,hk->hv", state, q) * K**-0.5, state


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = dict(dtype=torch.bfloat16, device=device)
    q, k = torch.randn(2, B, T, H, K, **bf16)
    v = torch.randn(B, T, HV, V, **bf16)
    a, b = torch.randn(2, B, T, HV, **bf16)  # raw gate, logit of beta
    A_log, dt_bias = torch.zeros(2, HV, device=device)  # the layer's parameters
    pool = torch.randn(SLOTS, HV, V, K, device=device)  # bf16 and fp16 work as well
    slots = torch.tensor([3, 0, 7, -1], device=device)  # request 3 is padding
    before = pool.clone()

    output = gdntune.gated_delta_rule_decode(
        q, k, v, A_log=A_log, a=a, dt_bias=dt_bias, b=b,
        initial_state=pool, initial_state_indices=slots,
    )  # fmt: skip

    changed = (pool != before).flatten(1).any(1).nonzero().flatten().tolist()
    truth, state = by_hand(q[0, 0], k[0, 0], v[0, 0], a[0, 0], b[0, 0], A_log, dt_bias, before[3])
    close = torch.allclose(output[0, 0].double(), truth, rtol=2e-2, atol=2e-2)
    same_state = torch.allclose(pool[3].double(), state, rtol=1e-4, atol=1e-4)
    print("output", list(output.shape), output.dtype)
    print("slots updated:", changed)
    print("padding gives zeros:", not output[3].any().item())
    print("as computed by hand:", close and same_state)


if __name__ == "__main__":
    main()
