# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Tensors that grow token by token, in buffers with room: most decoding steps copy nothing of the past."""

import weakref

import torch

ROOM = 256  # tokens: bounds both what a buffer wastes and how often its past is copied


class GrowingTensors:
    """Appends to tensors by name. The tensor that `append` returned last under a name owns the room behind it, and is the
    only one that will be appended to in place; any other, such as a selection of rows, is copied to a new buffer first.

    With gradients enabled nothing is written in place: what was returned may be part of an autograd graph.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[weakref.ref, int]] = {}  # the tensor and what its buffer can hold

    def __reduce__(self):
        return type(self), ()  # a copy owns no room

    def append(self, name: str, held: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
        """`held` with `new` behind it along `dim`; a view of a buffer, which later calls fill up.

        As after `torch.cat`, `held` still has its values: later calls write behind it.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or held.dtype != new.dtype:
            return torch.cat((held, new), dim=dim)
        length, wanted = held.shape[dim], held.shape[dim] + new.shape[dim]
        capacity = self._capacity(name, held)
        # Outside of inference mode its tensors may not be written to.
        if wanted > capacity or held.is_inference() != torch.is_inference_mode_enabled():
            capacity = wanted + ROOM
            buffer = new.new_empty(self._sizes(held, dim, capacity))
            buffer.narrow(dim, 0, length).copy_(held)
        else:
            buffer = held.as_strided(self._sizes(held, dim, capacity), held.stride(), held.storage_offset())
        buffer.narrow(dim, length, new.shape[dim]).copy_(new)
        grown = buffer.narrow(dim, 0, wanted)
        self._owners[name] = weakref.ref(grown), capacity
        return grown

    def shorten(self, name: str, held: torch.Tensor, length: int, dim: int) -> torch.Tensor:
        """The first `length` places of `held`, whose room is theirs from now on: appending overwrites what came after."""
        capacity = self._capacity(name, held)
        short = held.narrow(dim, 0, length)
        self._owners[name] = weakref.ref(short), capacity
        return short

    def forget(self) -> None:
        """Own nothing any more: the next append copies."""
        self._owners.clear()

    def _capacity(self, name: str, held: torch.Tensor) -> int:
        owner, capacity = self._owners.get(name, (None, 0))
        return capacity if owner is not None and owner() is held else 0

    @staticmethod
    def _sizes(tensor: torch.Tensor, dim: int, capacity: int) -> list[int]:
        sizes = list(tensor.shape)
        sizes[dim] = capacity
        return sizes
