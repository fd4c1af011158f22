"""q, k and v of one packed tensor, as views."""

from torch import Tensor

from gdntune.errors import UnsupportedProblem


def views(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, state: Tensor, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 1, H, K], k and v [B, 1, HV, V] of mixed_qkv [B, 2 H K + HV V]."""
    shape, state_shape = mixed_qkv.shape, state.shape
    if len(shape) != 2 or b.dim() != 2 or a.dim() != 2 or len(state_shape) != 4:
        raise UnsupportedProblem(
            f"mixed_qkv has shape {tuple(shape)}, a {tuple(a.shape)}, b {tuple(b.shape)},"
            f" initial_state {tuple(state_shape)}: expected [B, 2*H*K + HV*V], [B, HV], [B, HV] and"
            " [slots, HV, V, K]"
        )
    B, width = shape
    HV = b.shape[1]
    _, _, V, K = state_shape
    if layout == "v_last":
        V, K = K, V
    keys = width - HV * V
    if K < 1 or keys <= 0 or keys % (2 * K):
        raise UnsupportedProblem(
            f"mixed_qkv has {width} columns with HV={HV}, K={K}, V={V}: expected 2*H*K + HV*V, with"
            " H a divisor of HV"
        )
    # as_strided makes each view at once: slice, unflatten and unsqueeze take three times as long
    row, column = mixed_qkv.stride()
    at, H = mixed_qkv.storage_offset(), keys // (2 * K)
    strides, half = (row, row, K * column, column), keys // 2 * column
    sizes = (B, 1, H, K)
    return (
        mixed_qkv.as_strided(sizes, strides, at),
        mixed_qkv.as_strided(sizes, strides, at + half),
        mixed_qkv.as_strided((B, 1, HV, V), (row, row, V * column, column), at + 2 * half),
    )
