"""What a hook reads of another library's checkpoint, and from where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True)
class Source:
    """A file or directory that is to become a checkpoint."""

    path: Path
    allow_pickle: bool = False
    """Whether files may run code of their own when they are read."""

    def load(self, path: Path, known: Mapping[str, Callable[..., Any]] | None = None) -> Any:
        """Return what ``torch.save`` wrote into a file, its tensors mapped from the disk where the file allows.

        Only tensors and plain values are read, unless ``allow_pickle``. ``known`` are harmless stand-ins for further
        classes that the file may mention, by their full names.

        Raises:
            CheckpointError: the file can't be read, is damaged, or needs another class.
        """
        from shardkit.checkpoints._torch_file import load

        return load(path, known or {}, allow_pickle=self.allow_pickle)


class Pieces(NamedTuple):
    """A tensor in runs of its elements, in the order of its memory: the first element of each, and a tensor with them.
    The runs don't overlap, and together they are the whole tensor."""

    shape: tuple[int, ...]
    runs: list[tuple[int, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What another library's checkpoint holds.

    Names are those of the module as the user wrote it; ``module.`` and the like before all of them is taken off.
    """

    kind: str
    """What it is, in a few words, such as the library's name and the stage."""
    weights: Mapping[str, Tensor | Pieces]
    """Parameters and buffers, as in the module's ``state_dict``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The further names of tied tensors, each with the one that ``weights`` has."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What modules keep beside tensors, as ``get_extra_state`` gave it, by the module's name."""
    buffers: Sequence[str] | None = None
    """Which of them are buffers; None where the checkpoint doesn't say."""
    frozen: Sequence[str] = ()
    """The parameters that are known not to be trained."""
    optimizer: Mapping[str, Any] | None = None
    """The optimizer's state as ``torch.optim`` gives it: ``state`` by parameter, and ``param_groups`` that list the
    parameters under ``params``. A parameter is a name, or a number where the checkpoint doesn't say which it is."""
    masters: Mapping[Any, Tensor | Pieces] = field(default_factory=dict)
    """Weights by the optimizer's parameters in a higher precision than in ``weights``, whose place they take."""
    optimizer_class: str | None = None
    """The optimizer's, such as ``AdamW``; None if any that has its settings may go on."""
    steps: int | None = None
    """Steps that moved the weights; None where the checkpoint doesn't say."""
    skipped_steps: int = 0
    scale: float | None = None
    """The loss scale of a training in fp16."""
    world_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """What else it holds: ``load`` of the session returns it. What a checkpoint can't hold is left out."""
