"""A sweep's folder and its report, made once."""

import pytest
import synthetic
from reported import FAILED

from gdntune.report.report import report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sweep of 18 cells with two variants that did not compile."""
    header = synthetic.run()
    return synthetic.write(
        tmp_path_factory.mktemp("sweep"), header, synthetic.records(header, extra=FAILED)
    )


@pytest.fixture(scope="module")
def made(folder):
    """Its report."""
    return report([folder])
