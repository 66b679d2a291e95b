"""The tiny model is made once for all end-to-end tests."""

import pytest

from rlk.model.tiny import create_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A directory with model/ and prompts.jsonl."""
    directory = tmp_path_factory.mktemp("tiny")
    create_tiny(directory)
    return directory
