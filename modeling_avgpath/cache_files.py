# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Caches on disk: tensors in safetensors, the rest in JSON, each covered by a checksum. Nothing is ever unpickled."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

TENSORS, FACTS = "cache.safetensors", "cache.json"
FORMAT = 1


def model_fingerprint(model) -> str:
    """A digest of a model's parameters: names, shapes, dtypes, and up to 64 values of each, evenly spread.

    Cheap (no more than a few kilobytes are read), and different for any two models that were trained apart.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        for tensor in stored_tensors(parameter.detach()):
            values = tensor.flatten()
            sample = values[:: max(1, values.numel() // 64)][:64].double().cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def stored_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself, or of a quantised one the integers and scales that it wraps, which alone can be sliced."""
    is_sharded = hasattr(weight, "full_tensor")  # which acts as a plain tensor
    if is_sharded or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in stored_tensors(getattr(weight, name))]


def write_cache(folder: str | os.PathLike, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Write `tensors` and JSON-ready `facts` into `folder`, made if need be; each file appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        tensor_file, fact_file = Path(temporary, TENSORS), Path(temporary, FACTS)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, tensor_file)
        facts = {"format": FORMAT, "tensors_sha256": _digest(tensor_file.read_bytes()), **facts}
        fact_file.write_text(json.dumps({"facts": facts, "sha256": _digest(_canonical(facts))}, indent=1))
        os.replace(tensor_file, folder / TENSORS)
        os.replace(fact_file, folder / FACTS)


def read_cache(folder: str | os.PathLike, device: str | torch.device) -> tuple[dict[str, torch.Tensor], dict]:
    """What `write_cache` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file was cut short, changed since, or written in a format that this version does not know.
    """
    folder = Path(folder)
    for name in (FACTS, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no saved cache: {name} is missing. Write one by cache.save_pretrained."
            )
    try:
        document = json.loads((folder / FACTS).read_bytes())
        facts, digest = document["facts"], document["sha256"]
        intact = digest == _digest(_canonical(facts))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FACTS} is damaged ({type(error).__name__}): save the cache anew.") from None
    if not intact:
        raise ValueError(f"{folder / FACTS} was changed after it was written (checksum): save the cache anew.")
    if facts["format"] != FORMAT:
        raise ValueError(f"{folder} was written in format {facts['format']}, this version reads {FORMAT}.")
    if _digest((folder / TENSORS).read_bytes()) != facts["tensors_sha256"]:
        raise ValueError(
            f"{folder / TENSORS} is cut short or was changed after it was written (checksum): save it anew."
        )
    try:
        return load_file(folder / TENSORS, device=str(device)), facts
    except SafetensorError as error:
        raise ValueError(f"{folder / TENSORS} is no safetensors file: {error}") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(facts: dict) -> bytes:
    return json.dumps(facts, sort_keys=True).encode()
