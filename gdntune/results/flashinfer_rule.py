"""FlashInfer's choice among our variants: the thresholds that it was shipped with, restated as
knobs. Needs no FlashInfer.

Facts of FlashInfer 0.7.2 (gdn_kernels/gdn_decode_bf16_state.py, gdn_decode_mtp.py,
gdn_decode_pretranspose.py), tuned on a B200 at HV=64; blocks have 128 threads. w is B*HV.

    bf16, w >= 1024, 512, 128   tile_v 128, 64, 32; 8 elements a load, 16 lanes a row, 4 rows; at
    T=1 from w = 512 alone
    bf16, T >= 2, below         tile_v 16; 4 elements, 32 lanes, 4 rows
    bf16, T = 1, below          the same with tile_v 16 to w = 128, above the largest of 128, 64, 32
    that makes four blocks an SM, else 32
    fp32, T >= 2                4 elements, 32 lanes; (tile_v, rows) are (8, 2) to w = 64, (16, 4)
    to 128, (16, 2) at T = 2 or else
                                (32, 4) to 448, (32, 4) to 1024, above (64, 8) at T = 2 with the
                                final state written, else (64, 4)
    T >= 2                      q and k normalised once a block, in shared memory
    fp32, T = 1                 eight blocks a head, each two tiles of 8 rows: tile_v 16, 2 rows; 4
    elements, 32 lanes
"""

import math
from collections.abc import Iterable, Mapping

from gdntune.kernels.spec import Variant
from gdntune.problem import Contract

KERNEL = "recurrent"
# Of equally near settings the one that is nearer in the first of these that differs.
_RATIOS = ("tile_v", "ilp", "vec", "lanes", "threads")


def wanted(contract: Contract, work_units: int, sm_count: int) -> dict[str, int] | None:
    """The knobs that FlashInfer takes; None for a contract that it has no kernel with thresholds
    for.

    It serves GDN with raw gates, a K-last state and V of 128 or less, in bf16 or fp32.
    """
    c = contract
    served = (
        c.op == "gdn_decode"
        and c.gate == "raw"
        and c.beta == "logit"
        and c.layout == "k_last"
        and not c.ragged
    )
    if not served or c.state_dtype not in ("bf16", "fp32") or c.K != 128 or c.V > 128:
        return None
    if c.state_dtype == "bf16" and c.V != 128:
        return None
    tile_v, rows, wide = (_bf16 if c.state_dtype == "bf16" else _fp32)(c, work_units, sm_count)
    vec = 8 if wide else 4
    return {
        "tile_v": min(tile_v, c.V),
        "ilp": rows,
        "vec": vec,
        "lanes": c.K // vec,
        "threads": 128,
    }


def _bf16(c: Contract, w: int, sm_count: int) -> tuple[int, int, bool]:
    wide = 128 if w >= 1024 else 64 if w >= 512 else 32 if w >= 128 else 0
    if wide >= (64 if c.tokens == 1 else 32):
        return wide, 4, True
    if c.tokens > 1 or w <= 128:
        return 16, 4, False
    return next((tile for tile in (128, 64, 32) if w * (c.V // tile) >= 4 * sm_count), 32), 4, False


def _fp32(c: Contract, w: int, sm_count: int) -> tuple[int, int, bool]:
    if c.tokens == 1:
        return 16, 2, False
    if w <= 64:
        return 8, 2, False
    if w <= 128:
        return 16, 4, False
    if w <= 448 and c.tokens == 2:
        return 16, 2, False
    if w <= 1024:
        return 32, 4, False
    return 64, 8 if c.tokens == 2 and c.mode == "update" else 4, False


def nearest(
    contract: Contract, work_units: int, sm_count: int, variants: Iterable[Variant]
) -> str | None:
    """The variant, by id, with FlashInfer's knobs, or those nearest to them by ratios; None where
    it has no thresholds, or none is ours.

    variants: of equally near ones the first is taken. Nearness is the sum of the ratios.
    """
    asked = wanted(contract, work_units, sm_count)
    if asked is None:
        return None
    ours = [v for v in variants if v.kernel == KERNEL and asked.keys() <= v.knobs.keys()]
    if not ours:
        return None
    return min(ours, key=lambda v: _distance(v.knobs, asked)).id


def _distance(knobs: Mapping[str, int | str | bool], asked: Mapping[str, int]) -> tuple[float, ...]:
    # Ratios: from 16 to 32 is as far as from 64 to 128.
    apart = [abs(math.log2(int(knobs[name]) / int(asked[name]))) for name in _RATIOS]
    return (sum(apart), *apart)
