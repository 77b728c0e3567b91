"""Tests of ``rlxf push`` and ``rlxf pull`` with a local server in place of the Hub."""

import json
import pickle
import shlex
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.entry_point import parse
from rlxf.cli.runs import options_to_config
from tests.cli.running import refused, train
from tests.sharing.hub_server import TOKEN, HubServer, use


@pytest.fixture
def hub(monkeypatch):
    """A server with the interface of the Hub, which huggingface_hub uses."""
    with HubServer() as server:
        use(server.url, monkeypatch)
        yield server
