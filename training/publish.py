# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Sending finished models to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx

from training.checkpoint import STATE_FILE
from training.recipe import SetupError

# What the Hub's client raises where the network, the token or the name is at fault, or the model card is refused.
HUB_ERRORS = (httpx.HTTPError, OSError, OfflineModeIsEnabled, HFValidationError, ValueError)


def open_repository(name: str, private: bool | None = None) -> str:
    """Create the model repository `name` if it does not exist yet; returns its full id.

    Called before a run, so that a missing token or a wrong name stops it at once and not at its end.

    Args:
        name: ``owner/name``, or a name in the account of the token's owner.
        private: whether a new repository is private; `None` leaves it to the account's default.

    Raises:
        SetupError: the repository cannot be created or written to.
    """
    try:
        return HfApi().create_repo(name, private=private, exist_ok=True).repo_id
    except HUB_ERRORS as error:
        raise SetupError(
            f"hub_model_id={name} cannot be written: {_one_line(error)}. Log in with `hf auth login`, or leave "
            "hub_model_id out and send the model later."
        ) from None


def upload_model(folder: Path, repository: str) -> str:
    """Send a model's folder, code and card included, as one commit; returns the commit's address.

    The state of the training stays behind: it names local paths, and nobody but the run needs it.

    Raises:
        SetupError: nothing was sent; the message says how to send it later.
    """
    try:
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, ignore_patterns=[STATE_FILE], commit_message="Upload model"
        )
    except HUB_ERRORS as error:
        raise SetupError(
            f"the model is complete in {folder}, but was not sent to {repository}: {_one_line(error)}. Send it with "
            f"`hf upload {repository} {folder} --exclude {STATE_FILE}`."
        ) from None
    return commit.commit_url


def _one_line(error: Exception) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text.rstrip(".") or type(error).__name__
