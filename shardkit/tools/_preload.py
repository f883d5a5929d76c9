"""Imported once by the server that forks the ranks of a comparison: torch, and what the workload imports."""

import contextlib
import os
import warnings

import torch.distributed
import torch.optim  # noqa: F401

from shardkit.workloads import _find

# The server's own output, such as what a workload's file prints at import, is none of the command's.
os.dup2(2, 1)
# What can't be imported is for the ranks to find, which can say so.
with warnings.catch_warnings(), contextlib.suppress(Exception, SystemExit):
    warnings.simplefilter("ignore")
    _find.function(os.environ["SHARDKIT_PRELOAD_WORKLOAD"])
