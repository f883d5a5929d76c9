"""Backend fsdp."""

from shardkit.testing import BackendSuite


class TestFSDP(BackendSuite):
    backend = "fsdp"
