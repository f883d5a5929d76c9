"""Backend ddp."""

from shardkit.testing import BackendSuite


class TestDDP(BackendSuite):
    backend = "ddp"
