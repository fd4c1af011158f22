"""Objects for the tests here, compiled in the background while earlier tests run."""

from collections.abc import Iterator

import pytest

from .build import Builder, spec_of


@pytest.fixture(scope="session")
def builder() -> Iterator[Builder]:
    """Compiles what it is asked for."""
    made = Builder()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def ahead(request: pytest.FixtureRequest, builder: Builder) -> None:
    """What a file's selected tests name as `row` is compiled in their order."""
    # a process of pytest-xdist has all files' tests in its list, and runs whole files
    for item in (item for item in request.session.items if item.path == request.path):
        if row := getattr(item, "callspec", None) and item.callspec.params.get("row"):
            builder.start(spec_of(row.contract, row.variant))
