"""What one micro-batch of a workload does in memory, known by running it on tensors that have shapes and no memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.batchnorm import _NormBase

from shardkit._footprint import ParameterSize
from shardkit._precision import DTYPES, lower
from shardkit.errors import InputError
from shardkit.nested import map_tensors
from shardkit.planner._as_cuda import as_on_cuda
from shardkit.planner._ledger import Ledger, storages
from shardkit.workloads import Workload
from shardkit.workloads._contract import check_size, tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer


NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Event(NamedTuple):
    """Something that happens in the pass, and the memory after it.

    ``forward`` is before a module runs that owns the parameters ``names``; ``backward`` is the loss; ``ready`` is when
    the gradient of the parameter ``names`` has been added up, in memory of ``nbytes``. ``live`` is what activations and
    temporary tensors hold then, and ``high`` the most that they hold until the next event, in bytes.
    """

    kind: Literal["forward", "backward", "ready"]
    names: tuple[str, ...]
    nbytes: int
    live: int
    high: int


@dataclass(frozen=True)
class Profile:
    """One micro-batch of a size.

    ``data`` is the most that the making of a batch holds, with the batch before, and ``kept`` what the allocator keeps
    of small blocks that the pass has freed.
    """

    batch: int
    events: tuple[Event, ...]
    data: int
    kept: int = 0


class Subject:
    """A workload on tensors without memory: what its model and optimizer are, and how its passes go."""

    def __init__(self, make: Callable[[], Workload], *, device: str) -> None:
        self.notes: list[str] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._kept = 0
        self._workload = self._made(make)
        model = self._workload.model.train()
        self._model = model
        updated = {id(value) for group in self.optimizer.param_groups for value in group["params"]}
        self.parameters = tuple(
            ParameterSize(name, tuple(value.shape), value.element_size(), value.requires_grad, id(value) in updated)
            for name, value in model.named_parameters()
        )
        self.buffers = storages(list(model.buffers()))
        self.owners = owners(model)
        self.dtypes = {value.dtype for value in model.parameters()}

    @property
    def optimizer(self) -> Optimizer:
        return self._workload.optimizer

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _made(self, make: Callable[[], Workload]) -> Workload:
        try:
            with self._fake:
                made = make()
            self._draw(made)
            return made
        except Exception as error:
            self.notes.append(
                f"the model was built with memory, once: on tensors without it, its function raises "
                f"{type(error).__name__}: {_first_line(error)}"
            )
        try:
            made = make()
            self._draw(made)
        except InputError:
            raise
        except Exception as error:
            raise InputError(_told("the workload", error)) from error
        places = {id(value): value for value in made.model.parameters()}
        with self._fake:
            made.model._apply(self._without_memory)
        fakes = dict(zip(places, made.model.parameters(), strict=True))
        for group in made.optimizer.param_groups:
            group["params"] = [fakes[id(value)] for value in group["params"]]
        return made

    def _draw(self, made: Workload) -> None:
        """Draw the first batch, and keep count of what it leaves behind, such as the text that all are taken from."""
        with Ledger() as ledger:
            batches = made.batches(1)
            if next(batches, None) is None:
                raise InputError("batches of the workload ends after 0 batches: it is endless")
            del batches
        self._kept = ledger.now

    def _cast(self, dtype: torch.dtype) -> None:
        """Give the weights another type, but for those of normalizing layers, which compute in float32."""
        kept = {value for part in self._model.modules() if isinstance(part, NORMS) for value in part.parameters(False)}
        for value in self._model.parameters():
            if value.is_floating_point() and value not in kept:
                value.data = value.data.to(dtype)

    def _without_memory(self, value: Tensor) -> Tensor:
        return value if isinstance(value, FakeTensor) else self._fake.from_tensor(value)

    def profile(self, batch: int, precision: str, weights: str | None = None) -> Profile:
        """Return what a micro-batch of this size does in this precision, with weights and inputs cast to ``weights``.

        Raises:
            InputError: it can't be known without real numbers.
        """
        ledger = Ledger()
        with ledger:
            batches = self._workload.batches(batch)
            drawn = self._next(batches, batch, 0)
            held = self._kept + ledger.now
            ledger.forget_high()
            drawn_again = self._next(batches, batch, 1)
            data = self._kept + ledger.high
        check_size(drawn, batch)
        del drawn_again, batches
        try:
            events, kept = self._pass(
                map_tensors(drawn, self._fake.from_tensor), max(held, storages(drawn)), precision, weights
            )
        except InputError:
            raise
        except _ASKING as error:
            raise InputError(
                f"the workload can't be planned without real numbers: a micro-batch of {batch} asks a tensor for its "
                f"value, as .item(), float() or if do ({_where(error)}). shardkit max-batch, or "
                "shardkit.find_max_batch, measures it instead"
            ) from error
        except Exception as error:
            raise InputError(_told(f"a micro-batch of {batch} of the workload", error)) from error
        # Elsewhere than on the CPU batches are made in host memory.
        return Profile(batch, tuple(events), data if self._device == "cpu" else storages(drawn), kept)

    def _next(self, batches: Iterator[Any], size: int, count: int) -> Any:
        try:
            return next(batches)
        except StopIteration:
            raise InputError(
                f"batches({size}) of the workload ends after {count} batch{'es' * (count != 1)}: it is endless"
            ) from None
        except Exception as error:
            raise InputError(_told(f"batches({size}) of the workload", error)) from error

    def _pass(self, batch: Any, held: int, precision: str, weights: str | None) -> tuple[list[Event], int]:
        model = self._model
        before = {value: value.data for value in model.parameters()} if weights is not None else {}
        if weights is not None:
            with self._fake:
                self._cast(DTYPES[weights])
        events: list[Event] = []
        ledger = Ledger(cpu=self._device == "cpu")
        names = {id(value): name for name, value in model.named_parameters()}
        for value in [*model.parameters(), *model.buffers(), *tensors(batch)]:
            ledger.leave_out(value)
        # The batch; on another device its copy there.
        ledger.hold(held if self._device == "cpu" else storages(batch))

        def note(kind: Any, told: tuple[str, ...], nbytes: int = 0) -> None:
            if events:
                events[-1] = events[-1]._replace(high=ledger.high)
            events.append(Event(kind, told, nbytes, ledger.now, ledger.now))
            ledger.forget_high()

        def enter(module: nn.Module, _: Any) -> None:
            note("forward", self.owners[module])

        def ready(value: Tensor) -> None:
            assert value.grad is not None
            size = ledger.leave_out(value.grad)
            value.grad = None
            note("ready", (names[id(value)],), size)

        handles: list[Any] = []
        if weights is not None:
            handles.append(model.register_forward_pre_hook(_lowered(DTYPES[weights]), with_kwargs=True, prepend=True))
        handles += [part.register_forward_pre_hook(enter) for part in self.owners]
        handles += [
            value.register_post_accumulate_grad_hook(ready) for value in model.parameters() if value.requires_grad
        ]
        raise_again = lower(model, precision, torch.device("cpu"))
        rules = as_on_cuda() if self._device == "cuda" else nullcontext()
        try:
            with _quiet(), self._fake, rules, ledger:
                note("forward", ())
                loss = self._workload.loss(model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise InputError("loss of the workload returns no scalar with a gradient")
                note("backward", ())
                loss.backward()
                del loss
        finally:
            raise_again()
            for handle in handles:
                handle.remove()
            for value, data in before.items():
                value.data = data
            for value in model.parameters():
                value.grad = None
        events[-1] = events[-1]._replace(high=ledger.high)
        return events, ledger.kept


def _lowered(dtype: torch.dtype) -> Callable[..., Any]:
    def lower_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    return lower_inputs


def owners(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Return each module that has parameters of its own, with their names as the model has them."""
    names = {id(value): name for name, value in model.named_parameters()}
    own = {part: tuple(names[id(value)] for value in part.parameters(recurse=False)) for part in model.modules()}
    return {part: told for part, told in own.items() if told}


def _told(what: str, error: BaseException) -> str:
    return f"{what} raises {type(error).__name__}: {_first_line(error)} ({_where(error)})"


def _where(error: BaseException) -> str:
    """Return the last line of the user's own that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "shardkit/" not in frame.filename]
    last = (own or list(frames))[-1]
    return f"{last.filename}, line {last.lineno}"


_ASKING = (DataDependentOutputException, DynamicOutputShapeException)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "without a word").splitlines()[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what models warn of when they run from the user: nothing is trained."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
