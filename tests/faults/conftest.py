"""One working directory for the tests of a file, and processes of `rlhf` in it."""

from pathlib import Path

import pytest
from faults_world import Server, write_world


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Processes of `rlhf` in a working directory that holds the tiny pipeline's recipe and data."""
    home = tmp_path_factory.mktemp("world")
    write_world(home)
    return Server(home)


@pytest.fixture
def world(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's working directory, which is this process's too, and its home."""
    monkeypatch.chdir(server.home)
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return server.home
