"""Backend fairscale."""

from shardkit.testing import BackendSuite


class TestFairScale(BackendSuite):
    backend = "fairscale"
    left_out = {
        "fairscale:shard=optimizer a_sparse_gradient_that_shows_on_one_rank_is_averaged": (
            "only the rank that meets it is refused, and the others wait until it ends"
        )
    }
