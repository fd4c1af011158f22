"""A sweep's folder, made once, for the commands on it."""

import pytest
import synthetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up sweep's folder."""
    header = synthetic.run()
    return synthetic.write(tmp_path_factory.mktemp("sweep"), header, synthetic.records(header))
