"""Tests of requests to the Hub: missing packages, invalid settings, and messages."""

import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, logging

from rlxf.sharing.hub import HubError, check_repository, hub_request, redacted

try:
    import httpx2 as httpx
except ImportError:  # huggingface_hub 1
    import httpx


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install .*hub"):
        check_repository("me/agent")


def test_invalid_endpoint_is_named(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://[")
    with pytest.raises(ValueError, match="HF_ENDPOINT must be an address"):
        check_repository("me/agent")


@pytest.mark.parametrize(
    "name", ["", "agent", "a/b/c", "me/", "/agent", "me/..", "../agent", "me/a b", "x" * 99]
)
def test_invalid_names_of_repositories_are_refused(name):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        check_repository(name)


def test_texts_of_servers_are_one_short_line_without_tokens():
    assert redacted("a\n\x1b[2Jb hf_abcDEF123") == "a [2Jb hf_..."
    assert len(redacted("x" * 10**6)) < 400


def test_error_that_contains_the_token_is_not_chained():
    with pytest.raises(HubError) as failure, hub_request("me/agent"):
        raise httpx.LocalProtocolError("Illegal header value b'Bearer hf_secret value'")
    assert "secret" not in str(failure.value)
    assert failure.value.__cause__ is None


@pytest.mark.parametrize("fails", [False, True])
def test_settings_of_the_caller_are_restored(fails):
    before = are_progress_bars_disabled(), logging.get_verbosity()
    try:
        with hub_request("me/agent"):
            assert are_progress_bars_disabled()
            if fails:
                raise httpx.ConnectError("no network")
    except HubError:
        assert fails
    assert (are_progress_bars_disabled(), logging.get_verbosity()) == before
