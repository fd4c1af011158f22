"""The drift of a long decode, in a few steps: what it reports is there, and a state loses no more
than the rounding where it is stored.
"""

import pytest
import torch
from drift import STATES, drift


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: where cores are shared, a second thread makes an operation wait for it, a
    hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "device, steps", [("cpu", 100), pytest.param("cuda", 1000, marks=pytest.mark.gpu)]
)
def test_drift(device, steps):
    """bf16 and fp16 states drift by the rounding of what is stored, fp32 states stay within fp32's
    rounding, a wrong peer by far more.
    """

    peers = ("fakes.library",) if device == "cpu" else ("flashinfer",)
    found = drift(device, steps, peers)
    rows = {(r["who"], r["state"], r["step"]): r for r in found["rows"]}
    marks = [m for m in (1, 10, 100, 1000) if m <= steps]
    assert {key[1:] for key in rows if key[0] == "gdntune"} == {
        (d, m) for d in STATES for m in marks
    }
    for dtype, unit in (("bf16", 2.0**-9), ("fp16", 2.0**-12), ("fp32", 2.0**-25)):
        for mark in marks:
            ours, alone = rows["gdntune", dtype, mark], rows["rounding alone", dtype, mark]
            # one rounding a step at most, and what decays forgets
            assert alone["state_error"] < 30 * unit
            if dtype == "fp32":
                assert ours["state_error"] < 100 * unit
            else:
                assert ours["state_error"] < 1.1 * alone["state_error"]
            # the output itself is rounded to bf16
            assert ours["output_error"] < 1.2 * alone["output_error"] + 2.0**-8
    if device == "cpu":
        assert rows["fakes.library.right", "fp32", marks[-1]]["state_error"] < 100 * 2.0**-25
