"""Speculative decoding: T drafts per request in one call, then only some of them are accepted.

Five ways, by what is written. Runs on a GPU where torch finds one, else on the CPU:
python examples/verify.py
"""

import torch

import gdntune

B, T, H, HV, K, V = 2, 4, 4, 8, 128, 128


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = dict(dtype=torch.bfloat16, device=device)
    q, k = torch.randn(2, B, T, H, K, **bf16)
    v = torch.randn(B, T, HV, V, **bf16)
    a, b = torch.randn(2, B, T, HV, **bf16)
    A_log, dt_bias = torch.zeros(2, HV, device=device)
    drafts = dict(q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b)
    start = torch.randn(B, HV, V, K, device=device)

    # 1. Outputs alone: the state is read and not written.
    pool = start.clone()
    rows = torch.arange(B, device=device)
    alone = gdntune.gated_delta_rule_decode(
        **drafts, initial_state=pool, initial_state_indices=rows, disable_state_update=True
    )
    print("outputs alone", list(alone.shape), "- state untouched:", torch.equal(pool, start))

    # 2. The state after each token, in a buffer [B, T, HV, V, K]: keep that of the last accepted.
    buffer = torch.empty(B, T, HV, V, K, device=device)
    dense = gdntune.gated_delta_rule_decode(
        **drafts, initial_state=pool, initial_state_indices=rows,
        intermediate_states_buffer=buffer, disable_state_update=True,
    )  # fmt: skip
    accepted = torch.tensor([3, 1], device=device)
    pool.copy_(buffer[rows, accepted - 1])
    print("a buffer of states", list(buffer.shape), "- outputs agree:", _close(dense, alone))

    # 3. The state after each token, in a slot of the pool: request n's token t goes to slot
    #    [n, t]. Nothing is copied: the next call starts where this one's accepted tokens end.
    slots = torch.arange(B * T, device=device, dtype=torch.int32).view(B, T)
    wide = torch.zeros(B * T, HV, V, K, device=device)
    wide[slots[:, 0].long()] = start
    first = torch.ones(B, device=device, dtype=torch.int32)  # start from column 0
    step = gdntune.gated_delta_rule_decode(
        **drafts, initial_state=wide, ssm_state_indices=slots, num_accepted_tokens=first,
        disable_state_update=True,
    )  # fmt: skip
    kept = wide[slots[rows, accepted - 1].long()]
    print("a slot per token", list(slots.shape), "- outputs agree:", _close(step, alone))
    print("the accepted state is the same:", _close(kept, pool))
    following = gdntune.gated_delta_rule_decode(
        **drafts, initial_state=wide, ssm_state_indices=slots,
        num_accepted_tokens=accepted.int(), disable_state_update=True,
    )  # fmt: skip
    print("next step", list(following.shape), "starts from the accepted states")

    # 4. The raw window: verifying reads the states, and one call folds what was accepted into those
    #    of all layers. It owns states and inputs; here of one layer.
    problem = gdntune.Problem(gdntune.Contract(tokens=T, state_dtype="fp32"), B, H, HV)
    window = gdntune.RawWindow(
        problem, layers=1, slots=B, A_log=A_log[None], dt_bias=dt_bias[None], device=device
    )
    window.state(0).copy_(start)
    verified = window.verify(0, q, k, v, a, b, rows)
    window.commit(rows, accepted)
    print(
        "a raw window",
        f"{window.bytes / 2**20:.1f} MiB",
        "- outputs agree:",
        _close(verified, alone),
    )
    print("the committed state is the same:", _close(window.state(0), kept))

    # 5. A ring of corrections: as the raw window, but what is accepted stays in the ring, and the
    #    state is written once in several steps. `commit` writes it at once.
    problem = gdntune.Problem(problem.contract.replace(ring=16), B, H, HV)
    ring = gdntune.RingState(
        problem, layers=1, slots=B, A_log=A_log[None], dt_bias=dt_bias[None], device=device
    )
    ring.state(0).copy_(start)
    ring.begin(rows)
    verified = ring.verify(0, q, k, v, a, b, rows)
    ring.accept(rows, accepted)
    print("a ring", ring.counts.tolist(), "entries - outputs agree:", _close(verified, alone))
    print("no state was written:", torch.equal(ring.state(0), start))
    ring.commit(rows)
    print("the folded state is the same:", _close(ring.state(0), kept))


def _close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.allclose(x.float(), y.float(), rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    main()
