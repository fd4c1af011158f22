"""A peer's own tests on our drop-ins: `python tests/on_drop_ins.py {fla,flashinfer} PATH [pytest's
arguments]`.

Puts gdntune.engines.fla or .flashinfer in the place of the peer's functions, collects the tests of
PATH, and says which passed, failed, and were skipped and why: what a kernel of ours refuses, and
tests that call no function that has a drop-in. The peer must be importable, by triton for one: that
needs no GPU, and without one its tests run on the CPU (with --noconftest, where their conftest.py
asks for CUDA). Exits with 1 if a test failed.
"""

import argparse
import functools
import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cpu_for_cuda
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gdntune.errors import UnsupportedProblem

# The functions of each drop-in, and where the peer's tests import them from.
PLACES = {
    "fla": {
        "fused_recurrent_gated_delta_rule": (
            "fla.ops.gated_delta_rule.fused_recurrent", "fla.ops.gated_delta_rule", "fla.ops",
        ),
        "fused_recurrent_kda": ("fla.ops.kda.fused_recurrent", "fla.ops.kda", "fla.ops"),
    },
    "flashinfer": dict.fromkeys(("gated_delta_rule_decode_pretranspose", "gated_delta_rule_decode", "gated_delta_rule_mtp"), ("flashinfer.gdn_decode", "flashinfer")),
}  # fmt: skip
NOT_OURS = "calls no function that has a drop-in"


class DropIns:
    """Replaces a peer's functions, and sorts its tests by what became of them."""

    def __init__(self, peer: str) -> None:
        self.peer, self.calls = peer, 0
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()

    def install(self) -> None:
        """Puts ours wherever the peer's tests may find its functions."""
        ours = importlib.import_module(f"gdntune.engines.{self.peer}")
        for name, places in PLACES[self.peer].items():
            function = self._counted(getattr(ours, name))
            for place in places:
                module = importlib.import_module(place)
                if hasattr(module, name):
                    setattr(module, name, function)
        if torch.cuda.is_available():
            return
        if self.peer == "fla":
            # where its tests put their tensors: it takes triton's presence for a GPU's
            importlib.import_module("fla.utils").device = "cpu"
        else:  # its tests name the device themselves
            cpu_for_cuda.install()
            importlib.import_module("flashinfer.utils").get_compute_capability = lambda *_: (9, 0)

    def _counted(self, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Runs a test; what ours refuses is skipped, as is what never asks ours."""
        before = self.calls
        try:
            result = yield
        except UnsupportedProblem as e:
            pytest.skip(str(e))
        except Exception as e:
            if self.calls == before:
                pytest.skip(f"{NOT_OURS}, and raises {type(e).__name__}: {str(e)[:100]}")
            raise
        if self.calls == before:
            pytest.skip(NOT_OURS)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what became of a test."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = getattr(crash, "message", str(report.longrepr))
            self.failed[report.nodeid] = text.splitlines()[0][:200] if text else ""
        elif report.skipped:
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")[:200]] += 1
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def summary(self) -> str:
        """Passed, failed and skipped, with reasons."""
        lines = [
            f"{self.peer}'s tests on gdntune: {len(self.passed)} passed, {len(self.failed)} failed,"
            f" {sum(self.skipped.values())} skipped ({self.calls} calls)"
        ]
        lines += [f"failed   {name}: {reason}" for name, reason in self.failed.items()]
        lines += [f"skipped  {n:4}  {reason}" for reason, n in self.skipped.most_common()]
        return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PLACES)
    parser.add_argument("path")
    given, more = parser.parse_known_args()
    plugin = DropIns(given.peer)
    plugin.install()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", "--no-summary"]
    status = pytest.main([given.path, *options, *more], plugins=[plugin])
    print(plugin.summary())
    return 1 if plugin.failed or status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else 0


if __name__ == "__main__":
    sys.exit(main())
