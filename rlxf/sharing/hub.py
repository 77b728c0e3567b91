"""Calls of the Hugging Face Hub: the client, names of repositories, and errors in one sentence."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlxf.utils.extras import install_command

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LIBRARY = "rlxf"
"""Name of this library in the metadata of a repository."""
MAX_MESSAGE = 300
"""Maximum number of characters of a message of a server that are shown."""
TOKEN = re.compile(r"\bhf_\w+")
SIGN_IN = "set HF_TOKEN to a token of an account with this permission, or run: hf auth login"


class HubError(OSError):
    """Error of a request to the Hub, or for a repository that is no valid run.

    The message names the repository, the fault and the remedy.
    """


def client() -> "HfApi":
    """Return a client of the Hub, with the endpoint and token of huggingface_hub (HF_ENDPOINT, HF_TOKEN).

    Raises:
        ImportError: if huggingface_hub is not installed; the message has the command that installs it.
        ValueError: if HF_ENDPOINT is not an address.
    """
    try:
        urlsplit(os.environ.get("HF_ENDPOINT", ""))  # huggingface_hub parses it when it is imported
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError(f"the Hub needs huggingface_hub: run {install_command('hub')} ({error})") from error
    except ValueError as error:
        raise ValueError(f"HF_ENDPOINT must be an address such as https://huggingface.co: {error}") from error
    return HfApi(library_name=LIBRARY)


def check_repository(repository: str) -> None:
    """Raise ValueError unless a repository is named ``OWNER/NAME``; other errors are those of `client`."""
    client()
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        valid = repository.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ValueError(
            f"a repository of the Hub is OWNER/NAME, each of letters, digits, '-', '_' and '.', got "
            f"{redacted(repository)!r}"
        )


def redacted(text: Any) -> str:
    """Return a text of a server in one line, shortened, without control characters and tokens."""
    line = "".join(char if char.isprintable() else " " for char in str(text))
    line = TOKEN.sub("hf_...", " ".join(line.split()))
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."


@contextmanager
def hub_request(repository: str, revision: str | None = None) -> Iterator[None]:
    """Context manager for requests: no progress bars and warnings, and errors as `HubError`.

    Args:
        repository: name of the repository, for messages.
        revision: requested revision, for messages.

    Raises:
        HubError: in place of all exceptions of huggingface_hub and of its HTTP library. Messages never
            contain the token.
        OSError: if a file cannot be written, e.g. because the disk is full.
    """
    with _quiet():
        try:
            yield
        except HubError:
            raise
        except Exception as error:  # the HTTP library of huggingface_hub differs between its versions
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, f"{repository}: {error.strerror}") from error
            raise HubError(_message(error, repository, revision)) from _without_request(error)


def _without_request(error: Exception) -> Exception | None:
    """Return the cause of a HubError; None if its text may contain the header with the token."""
    return None if TOKEN.search(str(error)) or "Bearer" in str(error) else error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without output of huggingface_hub; the settings of the caller are restored."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    had_bars = not are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    if had_bars:
        disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


def _message(error: Exception, repository: str, revision: str | None) -> str:
    """Return the sentence for an error of a request."""
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {redacted(revision)!r}: give a branch, a tag or a commit of it"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repository} requires that its conditions are accepted on its page: accept them, and {SIGN_IN}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no model repository {repository}, or it is private and no valid token gives access: "
            f"check the name; for a private one {SIGN_IN}"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return _status_message(error, repository)
    return _connection_message(error, repository)


def _status_message(error: Any, repository: str) -> str:
    status = error.response.status_code
    reason = redacted(error.server_message or "")
    detail = f" ({reason})" if reason else ""
    if status in (401, 403):
        return f"no permission for {repository}{detail}: {SIGN_IN}"
    return f"{_endpoint()} refuses the request for {repository} with status {status}{detail}: try again later"


def _connection_message(error: Exception, repository: str) -> str:
    """Return the sentence for an answer that is missing or malformed.

    The text of the error is left out: that of an invalid header contains the token.
    """
    from huggingface_hub import errors

    cause = error.__cause__ or error
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"{repository} cannot be reached in offline mode: unset HF_HUB_OFFLINE"
    if isinstance(error, ValueError | TypeError | KeyError | AttributeError | errors.FileMetadataError):
        return (
            f"{_endpoint()} does not answer as the Hub does ({type(cause).__name__}): check HF_ENDPOINT, "
            f"HF_TOKEN and the proxy"
        )
    return (
        f"{_endpoint()} cannot be reached for {repository}, or the transfer was interrupted "
        f"({type(cause).__name__}): check the network and HF_ENDPOINT, and try again"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return redacted(constants.ENDPOINT)
