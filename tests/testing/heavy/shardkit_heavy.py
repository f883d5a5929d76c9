"""A backend that imports torch to describe itself."""

from __future__ import annotations

from typing import Any

import torch

from shardkit import Backend, Variant, hookimpl


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(name="lazy", summary=torch.__version__, variants=(Variant(strategy="lazy", summary=""),))


@hookimpl
def shardkit_prepare() -> Any:
    return None
