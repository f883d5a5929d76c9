"""Imported once by the server that forks ranks: the libraries of all installed backends."""

import contextlib
import importlib
import importlib.util
import warnings

import torch

from shardkit import backends

# The first optimizer of a process has torch import its compiler, 1.4 s of CPU in every rank.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Torch compiles this package when it is imported, for a second.
    import torch.distributed.optim

    for backend in backends().values():
        # One that can't be imported is for the tests to find, not for the server.
        with contextlib.suppress(Exception, SystemExit):
            if backend.library is not None and importlib.util.find_spec(backend.library):
                importlib.import_module(backend.library)
