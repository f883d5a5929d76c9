"""Backend zero."""

from shardkit.testing import BackendSuite, preload

# Torch's package of distributed optimizers is compiled when it is imported, which takes a second and 18 MiB.
preload("shardkit_zero._library")


class TestZero(BackendSuite):
    backend = "zero"
