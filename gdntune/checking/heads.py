"""Rows as Qwen3-Next's projections leave them, q/k heads side by side, and the packed ones with the
same numbers.

Of a q/k head with r value heads in_proj_qkvz's row has [q | k | v | z], 2 K + 2 r V elements, and
in_proj_ba's [b | a], 2 r (`fix_query_key_value_ordering` of transformers' qwen3_next).
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.problem import Contract, Problem


def interleaved(
    mixed: Tensor, a: Tensor, b: Tensor, gate: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """The rows [B, T, 2 H K + 2 HV V] of packed ones, the output's gate and a and b, and the rows
    [B, T, 2 HV] of these. NaN where there is no gate: nobody may read it.
    """
    c, H, r = problem.contract, problem.H, problem.HV // problem.H
    q, k, v = (
        x.unflatten(-1, (H, -1)) for x in mixed.split((H * c.K, H * c.K, problem.HV * c.V), -1)
    )
    z = torch.full_like(v, torch.nan) if gate is None else gate.flatten(2).unflatten(-1, (H, -1))
    heads = [x.unflatten(-1, (H, r)) for x in (b, a)]
    return torch.cat((q, k, v, z), -1).flatten(2), torch.cat(heads, -1).flatten(2)


def views(problem: Problem, mixed: Tensor, beside: Tensor, gated: bool) -> dict[str, Any]:
    """A call's tensors of rows [B, T, 2 H K + 2 HV V] and [B, T, 2 HV], by their names in
    `spec.arguments_of`.
    """
    c, H, HV = problem.contract, problem.H, problem.HV
    keys, r = H * c.K, HV // H
    q, k, v = mixed[..., : 2 * keys + HV * c.V].split((keys, keys, HV * c.V), -1)
    first = mixed[..., 2 * c.K + r * c.V :]
    return {
        "mixed_qkv": mixed,
        "q": q.unflatten(-1, (H, c.K)),
        "k": k.unflatten(-1, (H, c.K)),
        "v": v.unflatten(-1, (HV, c.V)),
        "output_gate": first[..., : HV * c.V].unflatten(-1, (HV, c.V)) if gated else None,
        "b": beside[..., :HV],
        "a": beside[..., r : r + HV],
    }


def packed(contract: Contract, tensors: dict[str, Any]) -> tuple[Contract, dict[str, Any]]:
    """A call's contract and tensors with rows that are packed: others are copied."""
    if contract.conv_input != "interleaved":
        return contract, tensors
    mixed, v, H = tensors["mixed_qkv"], tensors["v"], tensors["q"].shape[2]
    (B, T, HV, V), K = v.shape, tensors["q"].shape[3]
    r = HV // H
    q, k, values, z = mixed.unflatten(-1, (H, -1)).split((K, K, r * V, r * V), -1)
    rows = torch.cat([x.flatten(2) for x in (q, k, values)], -1)
    own = {"mixed_qkv": rows}
    for name, x in zip("qkv", rows.split((H * K, H * K, HV * V), -1), strict=True):
        own[name] = x.unflatten(-1, tensors[name].shape[2:])
    for name in "ab":
        x = tensors[name]
        heads = x.as_strided((B, T, H, r), (*x.stride()[:2], 2 * r, 1))
        own[name] = heads.flatten(2)
    if tensors["output_gate"] is not None:
        own["output_gate"] = z.reshape(B, T, HV, V)
    return contract.replace(conv_input="packed"), {**tensors, **own}
