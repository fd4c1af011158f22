"""What a report says of a bench: whose choice it timed, and the peers beside it."""

import msgspec
import pytest
import synthetic
from reported import report_of

from gdntune.kernels.spec import Variant
from gdntune.peers.spec import Peer
from gdntune.results.records import Cell, Trial


def benched(header, found, choice, default="z", peer_trials=()):
    """A sweep's records as a bench's: each cell closes with what was called, and what the default
    rule says.
    """
    made = []
    for r in found:
        if isinstance(r, Cell):
            made += [t(r.problem) for t in peer_trials]
            r = msgspec.structs.replace(r, choice=choice(r.problem), default_variant=default)
        made.append(r)
    return msgspec.structs.replace(header, software={"table for gdn_decode": "t.json"}), made


def test_whose_choice_a_bench_timed():
    """Fault: a bench without a table said "cells have a tuned variant", of times of the default
    rule's choice.
    """
    header, one, other = synthetic.run(), synthetic.VARIANTS[0].id, synthetic.VARIANTS[1].id
    found = synthetic.records(header, batches=(1, 8))
    for default, choice, said in (
        (
            one,
            lambda p: one,
            "12 of 12 cells (a contract at a B, H and HV) have a time of the default rule's choice on NVIDIA",
        ),
        (other, lambda p: one, "have a time of the table's choice on NVIDIA"),
        (
            one,
            lambda p: one if p.B == 1 else other,
            "have a time of the table's choice (at 6 it is the default rule's) on NVIDIA",
        ),
    ):
        made = report_of(*benched(header, found, choice, default))
        text = " ".join(made.markdown().split())
        assert said in text and "tuned variant" not in text + made.html()


def test_peers_that_are_not_here_and_that_do_not_serve():
    """Fault: both were "failed", and no line said how many cells a peer has no time of, or why."""
    header = synthetic.run()
    lacking = Peer("x", ("no_such_package",), (), "pip install x", ()).absent()

    def lost(name, reason, status="failed"):
        variant = Variant("peer:" + name.partition(".")[0], "peer:" + name, {})
        return lambda p: Trial(
            problem=p, variant=variant, role="peer", stage="final", status=status, reason=reason
        )

    peer_trials = [
        lost("absent", lacking), lost("narrow", "decode: tokens=1, expected 2"), lost("wrong.decode", "check failed"),
        lost("crashing.decode", "exit code -11", "crashed"),
    ]  # fmt: skip
    made = report_of(
        *benched(
            header,
            synthetic.records(header),
            lambda p: synthetic.VARIANTS[0].id,
            peer_trials=peer_trials,
        )
    )
    text = " ".join(made.markdown().split())
    for said in (
        "- Against absent: it is not installed (18 cells).",
        "- Against narrow: it does not serve 18 cells.",
        "- Against wrong: it failed at 18 cells.",
        "- Against crashing: it crashed at 18 cells.",
        "| absent | not installed | pip install x (no package no_such_package) | 18 |",
        "| narrow | not served | decode: tokens=1, expected 2 | 18 |",
        "| wrong.decode | failed | check failed | 18 |",
    ):
        assert said in text
    found = {p["peer"]: p for p in made.peers()}
    assert found["absent"]["untimed"] == {"not installed": 18} and found["crashing"]["untimed"] == {
        "crashed": 18
    }
    assert found["absent"]["without_times"] == {
        "absent: not installed: pip install x (no package no_such_package)": 18
    }


def test_a_peer_that_does_more_is_compared_with_ours_and_the_same_behind_it():
    """Fault: vLLM's op has a norm inside, and its time stood beside ours without one."""
    header = synthetic.run()
    us = {
        p: 10.0 + p.B
        for p in {r.problem for r in synthetic.records(header) if hasattr(r, "problem")}
    }

    def timed(entry, role, slow, **knobs):
        variant = Variant("peer:x", f"peer:x.{entry}", knobs)
        return lambda p: Trial(
            problem=p, variant=variant, role=role, stage="final", status="ok",
            samples_us=[slow * us[p]] * 20, kernels=("a", "b"),
        )  # fmt: skip

    def report(*trials):
        choice = synthetic.VARIANTS[0].id
        return report_of(
            *benched(header, synthetic.records(header), lambda p: choice, peer_trials=trials)
        )

    op = timed("op", "peer", 12.0, partner="peer:x.ours_then_norm")
    made = report(op, timed("ours_then_norm", "partner", 10.0))
    (found,) = made.peers()
    assert found["geometric_mean"] == pytest.approx(1.2) and found["cells"] == 18
    assert found["mean_ratio"][0] == pytest.approx(1.2) and found["FASTER"] == 18
    rows = made.frame.loc[made.frame["variant"] == "peer:x.op"]
    assert set(rows["beside"]) == {"peer:x.ours_then_norm"}
    # without its partner's time it is compared with nothing
    (found,) = report(op).peers()
    assert found["cells"] == 0
