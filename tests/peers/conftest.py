"""Entries of peers, called without their libraries."""

import pytest
from fakes.library_function import Recorder
from fakes.signatures import SIGNATURES

from gdntune import peers
from gdntune.peers import spec


@pytest.fixture
def called(monkeypatch):
    """Binds an entry to a case and calls stand-ins in the library's place."""

    def call(peer, entry, case):
        recorders = []

        def imported(module, name):
            recorders.append(Recorder(SIGNATURES[peer][1][f"{module}:{name}"]))
            return recorders[-1]

        monkeypatch.setattr(spec, "imported", imported)
        bound = peers.get(peer).entry(entry).bind(case)
        bound.call()
        return recorders[-1], bound

    return call
