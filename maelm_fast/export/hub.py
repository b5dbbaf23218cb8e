"""An export to the Hugging Face hub. Nothing goes to the network unless it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maelm_fast.config import require
from maelm_fast.errors import UserError


def check_upload(repo: str) -> None:
    """Raises UserError if an upload to `repo` ("you/name") cannot work, as far as this machine can tell: before an
    hour is spent on what comes before it."""
    hub = _hub()
    require(repo.count("/") == 1, f"--push-to-hub takes OWNER/NAME, such as you/my-encoder, not '{repo}'")
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError as error:
        raise UserError(f"--push-to-hub {repo}: {_first_line(error)}") from None
    require(not hub.constants.HF_HUB_OFFLINE, "--push-to-hub, but HF_HUB_OFFLINE is set: unset it")
    require(
        hub.get_token() is not None,
        "--push-to-hub needs a token that may write: run 'hf auth login', or set HF_TOKEN",
    )


def upload(directory: Path, repo: str, *, public: bool = False) -> str:
    """Uploads a directory as one commit, to a model repository that is made if there is none: private, unless public.
    Returns its address. Raises UserError with the reason if that fails; the directory stays."""
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message=f"maelm-fast export: {directory.name}")
    except Exception as error:  # of a dozen kinds, some of them of the HTTP library
        raise UserError(
            f"{directory} is written, but not uploaded to {repo} ({_first_line(error)}); once that is mended: "
            f"hf upload {repo} {directory}"
        ) from None
    return str(address)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise UserError("--push-to-hub needs huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub
