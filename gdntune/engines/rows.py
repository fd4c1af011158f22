"""Packed rows of requests, as engines hold them: [1, L, ...] with one slot a request or a token."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdntune.errors import UnsupportedProblem


def decode(
    function: Callable[..., Tensor],
    rows: dict[str, Tensor],
    settings: dict[str, Any],
    *,
    slots: Tensor,
    accepted: Tensor | None,
    cu_seqlens: Tensor,
    output: Tensor | None,
) -> Tensor:
    """Decodes packed rows by one of the public functions; returns the output [1, L, HV, V].

    rows: q, k, v and the gates, each [1, L, ...]. slots: [N], a token a request from and to one
    slot, or [N, S]: the state after token t goes to slot [n, t], the start is in column
    accepted[n] - 1, the first without `accepted`. settings: what else the function takes.
    """
    if slots.dim() == 1:
        L, N = rows["q"].shape[1], cu_seqlens.shape[0] - 1
        if L != N or slots.shape[0] < N or accepted is not None:
            raise UnsupportedProblem(
                f"{L} rows of {N} requests with slots of shape {tuple(slots.shape)}: with one slot"
                " a request expected a row a request"
            )
        # A row a request is a dense batch of one token: no lengths to read.
        dense = {name: x.transpose(0, 1) for name, x in rows.items()}
        if output is not None:
            output = output.transpose(0, 1)
        slots = slots[:N]
        result = function(**dense, **settings, initial_state_indices=slots, output=output)
        return result.transpose(0, 1)
    return function(
        **rows,
        **settings,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        cu_seqlens=cu_seqlens,
        max_tokens=slots.shape[1],
        output=output,
    )
