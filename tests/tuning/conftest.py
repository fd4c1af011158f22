"""A tiny sweep's store and folder, made once."""

import pytest
from sweeps import run

from gdntune.objects.store import Store


@pytest.fixture(scope="module")
def store():
    """Compiled objects, kept for all tests."""
    return Store()


@pytest.fixture(scope="module")
def swept(tmp_path_factory, store):
    """One finished sweep that several tests look at."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, run(folder, store)
