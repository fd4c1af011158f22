"""How a case differs from a plain call: what `make_case` takes beside the problem."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The defaults are a plain call, whose pool has just the slots it needs, in shuffled order.

    Of the pool and its indices:
    slots: size of the pool, or rows of the state; None for as many as are needed.
    padding: share of requests that are padding, at least one where above 0; their inputs are NaN.
    skipped: share of requests that lack a place to write: final slot, buffer row or one column.
    out_of_range: indices beyond their tensor are among those that mean padding.
    permute: whether slots are shuffled.
    split: the final state goes to another slot than it came from.
    null_index: the slot that means padding, beside negative indices.

    Of memory:
    index_dtype: torch.int32 or torch.int64.
    strided_indices: indices are columns of wider tensors.
    slot_stride_pad: extra elements between slots, rows and steps; a multiple of 16 bytes, which
        kernels load at once.
    packed_qkv: q, k and v are views of one tensor.
    strided_gates: a and b lie in wider tensors.
    extra_steps, extra_rows: of the buffer, beyond T and B; of `slots`, extra columns.

    Of ragged calls:
    lengths: tokens of each request; None for T each.
    tail_rows: packed rows beyond the last request.

    Of the formula:
    use_qk_l2norm, scale, softplus_beta, softplus_threshold, lower_bound: as the kernels take them;
        a scale of None is K**-0.5.
    neg_eigval: beta is doubled.
    parameters_by_head: whether A_log and dt_bias are [HV] or [H].
    gate_shift: added to a. 2 makes decays of e^-0.4 to e^-4, which show errors of the gate best.
    extreme_gates: some gates at which exp overflows or vanishes.
    norm_eps: of a norm behind the delta rule.
    settled: no convolution lies so near the middle between two numbers of the inputs' dtype that a
        right kernel may round it to either; what is timed and not judged does without.

    Of a ring, whose requests have 0 to `ring` live entries each:
    flush_min: from so many on they are folded; None: as late as may be.
    append: whether the call's tokens are kept.
    """

    slots: int | None = None
    padding: float = 0.0
    skipped: float = 0.0
    out_of_range: bool = False
    permute: bool = True
    split: bool = False
    null_index: int = -1
    index_dtype: torch.dtype = torch.int32
    strided_indices: bool = False
    slot_stride_pad: int = 0
    packed_qkv: bool = False
    strided_gates: bool = False
    extra_steps: int = 0
    extra_rows: int = 0
    lengths: Sequence[int] | None = None
    tail_rows: int = 0
    use_qk_l2norm: bool = True
    scale: float | None = None
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    lower_bound: float = -5.0
    neg_eigval: bool = False
    parameters_by_head: Literal["HV", "H"] = "HV"
    gate_shift: float = 0.0
    extreme_gates: bool = False
    norm_eps: float = 1e-6
    settled: bool = True
    flush_min: int | None = None
    append: bool = True
