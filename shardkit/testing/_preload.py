"""Imported once by the server that forks ranks: the libraries of all installed backends."""

import contextlib
import importlib
import importlib.util
import warnings

from shardkit import backends

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for backend in backends().values():
        # One that can't be imported is for the tests to find, not for the server.
        with contextlib.suppress(Exception, SystemExit):
            if backend.library is not None and importlib.util.find_spec(backend.library):
                importlib.import_module(backend.library)
