"""Backend zero."""

from shardkit.testing import BackendSuite


class TestZero(BackendSuite):
    backend = "zero"
