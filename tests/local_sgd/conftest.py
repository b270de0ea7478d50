"""The examples of compressors are registered for the length of each test, and for nobody else."""

import pytest

from tests.compressors.examples import registered


@pytest.fixture(autouse=True)
def registered_examples():
    with registered():
        yield
