"""The mark that a plugin puts on its hooks."""

import pluggy

hookimpl = pluggy.HookimplMarker("shardkit")
"""Mark a function as an implementation of a hook; ``wrapper=True`` wraps those of other plugins."""
