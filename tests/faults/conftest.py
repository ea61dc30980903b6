"""One server for the tests of a process: it takes longer to start than the pipeline to run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_world import Server, serving, write_world


@pytest.fixture(scope="session")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(scope="module")
def server(only_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Processes of `rlhf` in a working directory that holds the tiny pipeline's recipe and data."""
    only_server.home = tmp_path_factory.mktemp("world")
    write_world(only_server.home)
    return only_server


@pytest.fixture
def world(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's working directory, which is this process's too, and its home."""
    monkeypatch.chdir(server.home)
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return server.home
