"""Long lives of sequences behind a ring, in a few steps: see `ring_sequences.py`."""

import pytest
import ring_sequences
import torch
from ring_sequences import Contract, bits, drifts, sequences

from gdntune.runtime.rings import RingState


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FEW = [
    Contract(tokens=4, ring=16, state_dtype="bf16"),
    Contract(tokens=4, ring=32, state_dtype="fp32"),
    Contract(tokens=4, ring=16, state_dtype="fp32", ring_dtype="bf16"),
    Contract(tokens=4, ring=16, ring_rounding="stochastic"),
]


@pytest.fixture
def two_forms(monkeypatch):
    """Of six."""
    kept = {name: ring_sequences.FORMS[name] for name in ("fp32", "bf16, u bf16")}
    monkeypatch.setattr(ring_sequences, "FORMS", kept)


def test_random_sequences_are_sequential_decode(two_forms):
    """States and outputs are no further from fp64 than one token a call is."""
    assert sequences(24, 20, "cpu")


def test_a_ring_that_counts_wrong_is_seen(two_forms, monkeypatch):
    """The judgement can fail: of a ring that keeps one draft more than was accepted."""
    accept = RingState.accept
    monkeypatch.setattr(
        RingState, "accept", lambda self, slots, n: accept(self, slots, n + (n > 0).to(n.dtype))
    )
    assert not sequences(8, 12, "cpu")


def test_a_ring_does_not_drift(capsys):
    """A table by state dtype and capacity; with u in bf16 as decode with such a state."""
    assert drifts(20, "cpu", contracts=FEW)
    said = capsys.readouterr().out
    assert "| fp32 | 32 | fp32 | nearest |" in said and "| bf16 | none |" in said


def test_bits_do_not_depend_on_the_batch():
    """Through folds, at every batch size of one rule."""
    assert bits("cpu", sizes=(1, 2, 5))
