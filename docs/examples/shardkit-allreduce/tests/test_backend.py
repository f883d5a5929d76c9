"""The backend, held to the contract of every backend: right, or refused with the same error on every rank."""

from shardkit.testing import BackendSuite


class TestAllreduce(BackendSuite):
    backend = "allreduce"
