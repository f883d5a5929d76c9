"""Every error that shardkit raises on purpose, one tree under :class:`ShardkitError`.

An error of a backend's own library goes through unchanged, with a note that names the backend.
"""


class ShardkitError(Exception):
    """The root of the tree: catch it to catch every refusal of shardkit."""


class StrategyError(ShardkitError, ValueError):
    """A strategy, one of its options, or a configuration file is wrong."""


class InputError(ShardkitError, ValueError):
    """The model, the optimizer or the loss that was handed over can't be trained as it is."""


class UnsupportedError(ShardkitError):
    """The backend can't do right what was asked of it; another one may."""


class BackendNotFoundError(ShardkitError, LookupError):
    """No installed backend has this name."""


class PluginError(ShardkitError, ImportError):
    """A backend's plugin can't be used: it fails to load, misdeclares itself, or its name is taken."""


class MissingLibraryError(PluginError):
    """A backend's library isn't installed, or not in a version that the plugin supports."""


class MismatchError(ShardkitError):
    """The ranks don't agree on what they were asked to do."""


class StateError(ShardkitError, RuntimeError):
    """A call came out of order, such as ``step`` before ``backward``."""


class NonFiniteError(ShardkitError, ArithmeticError):
    """A loss or a gradient isn't finite; weights and optimizer are as they were before the step."""


class CheckpointError(ShardkitError):
    """A checkpoint can't be written, or doesn't fit the session that reads it."""


class DamageError(CheckpointError):
    """A file of a checkpoint is missing, or isn't what was written."""


class TraceError(ShardkitError):
    """A trace can't be recorded, written or read, or isn't what was written."""


class LaunchError(ShardkitError, RuntimeError):
    """A launched process failed.

    ``rank`` is the first rank that failed; ``traceback`` is its traceback, or what is known of its death.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str | None = None) -> None:
        super().__init__(message, rank, traceback)
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


class TrialError(LaunchError):
    """A trial failed, and not for want of memory; ``batch`` is the micro-batch that it was tried with."""

    def __init__(
        self, message: str, rank: int | None = None, traceback: str | None = None, batch: int | None = None
    ) -> None:
        super().__init__(message, rank, traceback)
        self.args = (message, rank, traceback, batch)
        self.batch = batch


class OutOfMemoryError(ShardkitError, MemoryError):
    """Not even one sample fits into the budget of memory; ``asked`` bytes could not be allocated, 0 if not known."""

    def __init__(self, message: str, asked: int = 0) -> None:
        super().__init__(message, asked)
        self.asked = asked

    def __str__(self) -> str:
        return str(self.args[0])
