"""Objects for the tests here, compiled in the background while earlier tests run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import Builder, spec_of


@pytest.fixture(scope="session")
def builder(request: pytest.FixtureRequest) -> Iterator[Builder]:
    """Compiles what the selected tests name as `row`, in their order, and what else is asked for."""
    made = Builder()
    here = Path(__file__).parent
    for item in request.session.items:
        if here not in item.path.parents:  # other tests have parameters of that name
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is not None and (row := callspec.params.get("row")):
            made.start(spec_of(row.contract, row.variant))
    yield made
    made.close()
