"""Whether a model's own loss is divided by what the Trainer takes it to be divided by."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

logger = logging.getLogger(__name__)

_OWN_LOSS = re.compile(r"CrossEntropyLoss|cross_entropy|loss_fct")
_COUNTED = re.compile(r"loss_function|num_items_in_batch")


def ignores_the_count(model: Any) -> bool:
    """Return whether a model's forward takes ``num_items_in_batch`` among its keywords, and averages by itself.

    Told by the forward's source: it makes a loss of its own, and neither names the number nor calls the library's
    ``loss_function``, which divides by it.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):
        return False
    return bool(_OWN_LOSS.search(source)) and not _COUNTED.search(source)


def warn_of_the_count(model: Any, parts: int) -> None:
    """Say that a loss, and its gradient, are as many times too large as a step has parts."""
    name = type(model).__name__
    logger.warning(
        f"{name} takes num_items_in_batch and doesn't divide its loss by it, so that the loss and the gradient of a "
        f"step are {parts} times those of the mean over its micro-batches and ranks, as under the library's own "
        "Trainer: clipping and logs see that. Hand the Trainer a compute_loss_func that divides, or set "
        f"{name}.accepts_loss_kwargs = False for the mean of the micro-batches' means"
    )
