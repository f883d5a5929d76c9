"""Imported once by the server that forks the ranks of a comparison: torch, and what the workload imports."""

import contextlib
import importlib
import os
import signal
import warnings

import torch
import torch.nn.parallel

from shardkit.workloads import _find

# At Ctrl-C it is the command that ends the server and the ranks.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# The server's own output, such as what a workload's file prints at import, is none of the command's.
os.dup2(2, 1)
# The first optimizer of a process has torch import its compiler, which takes longer than all the rest.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
# What can't be imported is for the ranks to find, which can say so.
with warnings.catch_warnings(), contextlib.suppress(Exception, SystemExit):
    warnings.simplefilter("ignore")
    _find.any_function(os.environ["SHARDKIT_PRELOAD_WORKLOAD"])
for name in filter(None, os.environ.get("SHARDKIT_PRELOAD_MODULES", "").split(",")):
    with warnings.catch_warnings(), contextlib.suppress(Exception, SystemExit):
        warnings.simplefilter("ignore")
        importlib.import_module(name)
