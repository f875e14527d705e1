"""Push a trained drafter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from mlx_redrafter import hub
from mlx_redrafter.errors import DownloadError, FormatError, InputError
from mlx_redrafter.shipped import read_json


def publish(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a drafter's folder to ``repo`` (owner/name, or a name of your own), which is created
    if there is none; gives its address. What is hidden (".*") stays here.

    The token is the one that `hf auth login` keeps, or $HF_TOKEN. Raises RedrafterError.
    """
    from huggingface_hub import HfApi, errors

    check(repo)
    config = read_json(folder / "config.json") or {}
    if config.get("model_type") != hub.DRAFTER_TYPE or not (folder / "model.safetensors").is_file():
        raise FormatError(f"{folder} is not a drafter: it is not uploaded")
    api = HfApi()
    try:
        created = api.create_repo(repo, private=private, exist_ok=True)
        name = config.get("target", {}).get("name", "a model of its own")
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            commit_message=f"Drafter for {name}, by mlx-redrafter",
            ignore_patterns=[".*"],
        )
    except errors.HfHubHTTPError as error:
        reason = _one_line(error)
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            reason = f"the token may not write there ({reason}): run `hf auth login`"
        raise DownloadError(f"cannot upload to {repo}: {reason}") from error
    except ValueError as error:  # the README's metadata, say
        raise DownloadError(f"cannot upload to {repo}: {_one_line(error)}") from error
    except (_http_error(), OSError) as error:
        raise DownloadError(
            f"cannot upload to {repo}: the Hugging Face Hub does not answer "
            f"({_one_line(error)}); check the network, {folder} stays as it is"
        ) from error
    return str(created)


def check(repo: str) -> None:
    """Refuse what cannot be a repository's name, and an upload without a token, before hours of
    training."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined,unused-ignore]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(
            f"{repo!r} is no name of a repository: give owner/name ({_one_line(error)})"
        ) from None
    if get_token() is None:
        raise InputError(
            f"no token to upload to {repo} with: run `hf auth login`, or set HF_TOKEN to a token "
            "that may write"
        )


def _http_error() -> type[Exception]:
    """The base of what the Hub's client raises without a network: that of its HTTP library, which
    has been another one in each major version."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
