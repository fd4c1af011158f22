"""What the engines' kernels compute, in plain torch and fp64: behind the stand-ins of test_vllm.py
and test_sglang.py.
"""

import itertools
from collections import Counter

import torch
import torch.nn.functional as F

CALLS: Counter[str] = Counter()


def recurrence(q, k, v, g, beta, pool, starts, lengths, keep, scale=None, l2norm=True):
    """Rows q, k [L, H, K], v [L, HV, V], log decay g [L, HV] or [L, HV, K], beta [L, HV]; request n
    starts from slot starts[n], None is padding, and keep(n, t, state) gets the state after each
    token. Returns [L, HV, V], zeros for padding.
    """
    K, group = q.shape[2], v.shape[1] // q.shape[1]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    out, row = torch.zeros_like(v), 0
    for n, length in enumerate(lengths):
        if starts[n] is not None:
            state = pool[starts[n]].double()
            for t in range(length):
                i = row + t
                decay = g[i].exp()
                state = state * (decay[:, None, :] if g.dim() == 3 else decay[:, None, None])
                delta = (v[i] - (state @ k[i].unsqueeze(-1)).squeeze(-1)) * beta[i].unsqueeze(-1)
                state = state + delta.unsqueeze(-1) * k[i].unsqueeze(1)
                out[i] = (state @ q[i].unsqueeze(-1)).squeeze(-1)
                keep(n, t, state)
        row += length
    return out


def gate(x, A_log, dt_bias, lower_bound=None):
    """The log decay from a raw gate [L, HV] or [L, HV, K]."""
    kda = x.dim() == 3
    A = A_log.double().exp()
    x = x.double() + (dt_bias.double().reshape(x.shape[1:]) if kda else dt_bias.double())
    A = A[:, None] if kda else A
    return -A * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(A * x)


def split(mixed, HV, K, V):
    """q, k [L, H, K] and v [L, HV, V] of packed rows."""
    keys = (mixed.shape[1] - HV * V) // 2
    q, k, v = mixed.split([keys, keys, HV * V], 1)
    return q.unflatten(1, (-1, K)), k.unflatten(1, (-1, K)), v.unflatten(1, (HV, V))


def by_slots(q, k, v, g, beta, pool, slots, cu_seqlens, accepted, null, scale=None, l2norm=True):
    """vLLM's rule: the state after token t goes to slot [n, t], padding is null and below."""
    slots = slots.unsqueeze(1) if slots.dim() == 1 else slots
    bounds = cu_seqlens.tolist()
    first = [0] * (len(bounds) - 1) if accepted is None else [n - 1 for n in accepted.tolist()]
    starts = [slots[n, first[n]].item() for n in range(len(bounds) - 1)]

    def keep(n, t, state):
        if slots[n, t] > null:
            pool[slots[n, t]] = state.to(pool.dtype)

    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    starts = [s if s > null else None for s in starts]
    return recurrence(q, k, v, g, beta, pool, starts, lengths, keep, scale, l2norm)


def call(name, a):
    """A function of vLLM by its name, with its arguments."""
    CALLS[name] += 1
    return globals()[f"_{name}"](**a)


def _dense(B):
    return torch.arange(B + 1)


def _fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
    use_qk_l2norm_in_kernel,
):  # fmt: skip
    q, k, v = split(mixed_qkv, a.shape[1], initial_state.shape[3], initial_state.shape[2])
    o = by_slots(
        q, k, v, gate(a, A_log, dt_bias), torch.sigmoid(b.double()), initial_state,
        ssm_state_indices, _dense(len(q)), None, 0, scale, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    out.copy_(o.unsqueeze(1))
    return out, initial_state


def _fused_sigmoid_gating_delta_rule_update(
    A_log, a, b, dt_bias, q, k, v, beta, threshold, scale, initial_state, inplace_final_state,
    cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, is_kda,
):  # fmt: skip
    o = by_slots(
        q[0], k[0], v[0], gate(a, A_log, dt_bias), torch.sigmoid(b.double()), initial_state,
        ssm_state_indices, cu_seqlens, num_accepted_tokens, 0, scale, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o.to(q.dtype).unsqueeze(0), initial_state


def _fused_gdn_decode_post_conv_mtp(
    mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state,
    output_gate, norm_weight, out, scale, norm_eps, output_gate_activation,
):  # fmt: skip
    q, k, v = split(mixed_qkv, a.shape[1], state.shape[3], state.shape[2])
    o = by_slots(
        q, k, v, gate(a, A_log, dt_bias), torch.sigmoid(b.double()), state, state_indices,
        cu_seqlens, num_accepted_tokens, 0, scale,
    )  # fmt: skip
    z = output_gate.double()
    z = torch.sigmoid(z) if output_gate_activation == "sigmoid" else F.silu(z)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double() * z
    out = torch.empty_like(output_gate) if out is None else out
    return out.copy_(o)


def _fused_recurrent_kda_packed_decode(
    mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale,
    out,
):  # fmt: skip
    _, HV, V, K = initial_state.shape
    q, k, v = split(mixed_qkv, HV, K, V)
    o = by_slots(
        q, k, v, gate(raw_g[0], A_log, dt_bias, lower_bound), torch.sigmoid(raw_beta[0].double()),
        initial_state, state_indices, _dense(len(q)), None, 0, scale,
    )  # fmt: skip
    o = o.to(mixed_qkv.dtype).unsqueeze(0)
    return (o if out is None else out.copy_(o)), initial_state


def _fused_recurrent_kda(
    q, k, v, initial_state, cu_seqlens, ssm_state_indices, raw_g=None, raw_beta=None, A_log=None,
    dt_bias=None, lower_bound=None, num_accepted_tokens=None, out=None, fuse_gate=None, g=None,
    beta=None, scale=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True, kwargs=None,
):  # fmt: skip
    if g is None:
        g = gate(raw_g[0], A_log, dt_bias, lower_bound)
        beta = torch.sigmoid(raw_beta.double())
    else:
        g = g[0]
    o = by_slots(
        q[0], k[0], v[0], g, beta[0], initial_state, ssm_state_indices, cu_seqlens,
        num_accepted_tokens, 0, scale, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    o = o.to(q.dtype).unsqueeze(0)
    return (o if out is None else out.copy_(o)), initial_state


def _fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
    num_accepted_tokens, use_qk_l2norm_in_kernel,
):  # fmt: skip
    o = by_slots(
        q[0], k[0], v[0], g[0], beta[0], initial_state, ssm_state_indices, cu_seqlens,
        num_accepted_tokens, 0, scale, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o.to(q.dtype).unsqueeze(0), initial_state


def sglang(method, kda, a):
    """A method of SGLang's Triton kernels: padding is below 0, and starts from an empty state."""
    CALLS[f"{'kda' if kda else 'gdn'}.{method}"] += 1
    pool, slots = a["ssm_states"], a["cache_indices"].tolist()
    _, HV, V, K = pool.shape
    if method == "packed_decode":
        q, k, v = split(a["mixed_qkv"], HV, K, V)
        bounds = range(len(q) + 1)
    else:
        q, k, v = (a[name][0] for name in "qkv")
        bounds = a["query_start_loc"].tolist()
    L = len(q)
    raw, bound = a["a"].reshape(L, HV, K) if kda else a["a"], a.get("lower_bound")
    g = gate(raw, a["A_log"].reshape(-1), a["dt_bias"], bound)
    beta = torch.sigmoid(a["b"].reshape(L, HV).double())

    def keep(n, t, state):
        if method == "target_verify":
            row = a["intermediate_state_indices"][n]
            a["intermediate_states_buffer"][row, t] = state.to(pool.dtype)
        else:
            pool[slots[n]] = state.to(pool.dtype)

    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    starts = [s if s >= 0 else None for s in slots[: len(lengths)]]
    out = recurrence(q, k, v, g, beta, pool, starts, lengths, keep, a.get("scale"))
    return out.to(q.dtype).unsqueeze(0)
