"""Streams that do nothing: what FairScale's FullyShardedDataParallel needs of CUDA, for tests on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class _Cuda:
    Stream = _Stream
    _only = _Stream()

    def is_available(self) -> bool:
        return True

    def current_stream(self) -> _Stream:
        return self._only

    def synchronize(self) -> None:
        pass

    def stream(self, stream: _Stream) -> Any:
        return nullcontext()


class _Torch:
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pretend() -> None:
    """Have FairScale's module take this process's CPU for a device with streams."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

    module.torch = _Torch()
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
