# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Caches on disk: one safetensors file whose header carries the rest as JSON, all of it under checksums.

Nothing is ever unpickled. One file, so that a reader beside a writer sees the old cache or the new one, never half of each.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CACHE_FILE = "cache.safetensors"
FORMAT = 2


def model_fingerprint(model) -> str:
    """A digest of a model's parameters, the same on every device: names, shapes, dtypes, 64 values of each evenly spread,
    and the sum of all bits, which no single changed value leaves as it was.

    All weights are read once. Those that accelerate keeps on disk are read from there.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            parameter = _offloaded_weight(model, name, parameter)
        for tensor in stored_tensors(parameter.detach()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if not tensor.is_meta:
                digest.update(_sample(tensor) + _sum_of_bits(tensor).to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def weights_glimpse(model) -> tuple[list, list[torch.Tensor]]:
    """What changes when parameters of a model are written or replaced: places and version counters, and the last value of
    each, which writes to `.data` do not hide from. Nothing is read back from the device."""
    versions, values = [], {}
    for parameter in model.parameters():
        for tensor in stored_tensors(parameter.detach()):
            if hasattr(tensor, "full_tensor") or tensor.is_meta or not tensor.numel():
                continue
            versions.append((tensor.data_ptr(), None if tensor.is_inference() else tensor._version))
            values.setdefault((tensor.dtype, tensor.device), []).append(tensor[(-1,) * tensor.ndim])
    return versions, [torch.stack(group) for group in values.values()]


def is_unchanged(model, glimpse: tuple[list, list[torch.Tensor]]) -> bool:
    """Whether the weights are those of an earlier glimpse, as far as one can tell without reading all."""
    versions, values = weights_glimpse(model)
    return versions == glimpse[0] and all(map(torch.equal, values, glimpse[1]))


def stored_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself, or of a quantised one the integers and scales that it wraps, which alone can be sliced."""
    is_sharded = hasattr(weight, "full_tensor")  # which acts as a plain tensor
    if is_sharded or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in stored_tensors(getattr(weight, name))]


def _sample(tensor: torch.Tensor) -> bytes:
    values = tensor.flatten()
    return values[:: max(1, values.numel() // 64)][:64].double().cpu().numpy().tobytes()


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's 64-bit words modulo 2^64: exact in any order, so the same on every device."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    content = tensor.contiguous().flatten().view(torch.uint8)
    whole = content.numel() // 8 * 8
    words, rest = content[:whole], content[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    total = int(words.view(torch.int64).sum()) + int(rest.sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


def _offloaded_weight(model, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight behind a place-holder on the meta device, from accelerate's hook that brings it in; itself if none does."""
    module, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(module), "_hf_hook", None)
    for member in getattr(hook, "hooks", (hook,)):
        weights_map = getattr(member, "weights_map", None)
        if weights_map is not None and leaf in weights_map:
            return weights_map[leaf]
    return weight


def write_cache(folder: str | os.PathLike, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Write `tensors` and JSON-ready `facts` into `folder`, made if need be; they appear together or not at all."""
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(f"A cache is saved into a folder, and {folder} is a file: give another path.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    document = json.dumps({"format": FORMAT, **facts, "checksums": _checksums(tensors)}, sort_keys=True)
    header = {
        "facts": f"{hashlib.sha256(document.encode()).hexdigest()} {document}"
    }  # one entry: several have no order
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        file = Path(temporary, CACHE_FILE)
        save_file(tensors, file, metadata=header)
        os.replace(file, folder / CACHE_FILE)


def read_cache(folder: str | os.PathLike, device: str | torch.device) -> tuple[dict[str, torch.Tensor], dict]:
    """What `write_cache` wrote, with the tensors on `device`.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        ValueError: it was cut short, changed since, or written in a format that this version does not know.
        RuntimeError: there is no such device.
    """
    device = torch.device(device)
    if Path(folder).is_file():
        raise NotADirectoryError(
            f"A cache is loaded from its folder, and {folder} is a file: give {Path(folder).parent}."
        )
    file = Path(folder, CACHE_FILE)
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved cache: {CACHE_FILE} is missing. Write one by cache.save_pretrained."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            digest, _, document = (opened.metadata() or {}).get("facts", "").partition(" ")
            if hashlib.sha256(document.encode()).hexdigest() != digest:
                raise ValueError(
                    f"{file} was changed after it was written (checksum of its facts): save the cache anew."
                )
            facts = json.loads(document)
            if facts["format"] != FORMAT:
                raise ValueError(f"{file} was written in format {facts['format']}, this version reads {FORMAT}.")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short or damaged ({error}): save the cache anew.") from None
    checksums = _checksums(tensors)
    if checksums != facts["checksums"]:
        different = sorted(name for name, _ in checksums.items() ^ facts["checksums"].items())
        raise ValueError(f"{file} was changed after it was written (checksum of {different[0]}): save the cache anew.")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, facts


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
