"""Every CUDA kernel, interpreted: pairwise rows of what it serves, judged by the fp64 reference."""

import pytest
import torch

from gdntune import sol
from gdntune.checking.cases import floor_case, make_case
from gdntune.checking.check import Truth
from gdntune.problem import TYPES

from . import call, cover

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

DECODE_ROWS = [row for name in cover.decode_kernels() for row in cover.rows(name)]
# q, k and v of fp32, which no engine has
LEFT_OUT = {"input_dtype": {"fp32"}}


@pytest.mark.parametrize("row", DECODE_ROWS, ids=lambda row: row.id)
def test_decode(row, builder):
    """Right by the gate that every variant passes, with no access out of bounds and no race."""
    options = dict(row.options)
    truth = Truth(make_case(row.problem, "cpu", 0, **options))
    case = truth.before.clone()
    kernel = call.decode(builder.get(row.contract, row.variant), row.contract)
    try:
        kernel(*case.arguments())
        truth.judge(case).require()
    except Exception as e:
        raise AssertionError(f"{row.id}, {row.problem.key()}, {options}: {e}") from e


def test_rows_hold_every_value():
    """What the kernels serve among them: each value of each field of a contract, at least once."""
    for field, values in TYPES.items():
        held = {getattr(row.contract, field) for row in DECODE_ROWS}
        assert held >= set(values) - LEFT_OUT.get(field, set())
    for name in cover.decode_kernels():
        assert len(cover.rows(name)) >= 6, name


@pytest.mark.parametrize("row", cover.floor_rows(), ids=lambda row: row.id)
def test_floor(row, builder):
    """The slots that are named are moved and multiplied; nothing else is touched."""
    kernel = call.floor(builder.get(row.contract, row.variant), row.contract)
    state, slots, buffer, _, sink = floor_case(row.problem, sol.floor_form(row.contract))
    before = state.clone()
    few = len(slots) - 1
    kernel(state, slots[:few], None if buffer is None else buffer[:few], 0.5, sink)
    moved = slots[:few].long() if row.variant.knobs["indexed"] else torch.arange(few)
    update = row.contract.mode == "update"
    want = before.clone()
    want[moved] = want[moved] * (0.5 if update else 1.0)
    assert torch.equal(state, want)
    if buffer is not None:
        assert torch.equal(buffer[:few], (before[moved] * 0.5)[:, None].expand_as(buffer[:few]))
        assert buffer[few:].isnan().all()
