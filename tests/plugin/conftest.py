"""A Trainer leaves launcher variables in the environment; no later test may find them."""

import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def environment_as_before():
    with mock.patch.dict(os.environ):
        yield
