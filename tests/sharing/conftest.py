"""Fixtures of the tests of the Hub."""

import pytest

from tests.sharing.hub_server import HubServer, use


@pytest.fixture
def hub(monkeypatch):
    """A server with the interface of the Hub, which huggingface_hub uses."""
    with HubServer() as server:
        use(server.url, monkeypatch)
        yield server
