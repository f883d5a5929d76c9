"""Tools to test a backend with."""

from shardkit.testing._ranks import preload as preload
from shardkit.testing._ranks import run as run

__all__ = ["preload", "run"]
