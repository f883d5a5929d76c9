"""The engine over fully_shard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import InputError, StateError, UnsupportedError
from shardkit.gradients import gradients, settled, unscale
from shardkit.lockstep import broken
from shardkit.optimizers import Attributes, cut, twin
from shardkit_fsdp._collectives import whole
from shardkit_fsdp._shards import Shards

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_fsdp._held import Held
    from shardkit_fsdp._options import FSDPOptions


@final
class FSDPEngine(Engine):
    """The user's module with fully_shard's hooks, and a twin of the user's optimizer over this rank's shards.

    Gradients are averaged in every backward, as they come, so that a rank holds its shards of them and no more.
    """

    whole_gradients = False
    lockstep = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FSDPOptions) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._max_norm = strategy.max_grad_norm
        self._want_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._world_size = dist.get_world_size()
        self._device = next(model.parameters()).device
        self._places = [
            (part, name, value)
            for part in model.modules()
            for name, value in part._parameters.items()
            if value is not None
        ]
        self._shards = shards = Shards(model, options, strategy.precision)
        self._shared = shards.shared
        self._names = shards.names
        self._held = shards.held
        self._by_id = {id(held.value): held for held in self._held}
        self._settled: float | None = None
        self._absent: frozenset[int] = frozenset()
        self._reading = False
        self._attach(optimizer)
        for part in model.modules():
            # ``state_dict``, and what calls it, would write down tensors without elements.
            shards.restore.handles.append(part.register_state_dict_pre_hook(self._refuse_empty))
            shards.restore.handles.append(part.register_load_state_dict_pre_hook(self._refuse_assign))
        self._versions = self._written()
        # Ranks end at different lengths, and a module that gathers as it runs would wait for the others for ever.
        shards.restore.wrap(model, "generate", self.gathered)
        shards.restore.built()

    def _attach(self, optimizer: Optimizer) -> None:
        """Make a twin of the optimizer over this rank's shards, with what state the optimizer brings."""
        groups = [{**_settings(group), "params": []} for group in optimizer.param_groups]
        self._twin = twin(optimizer, groups)
        self._attributes = Attributes(optimizer, self._twin)
        self._groups = list(zip(groups, optimizer.param_groups, strict=True))
        self._trained: list[list[tuple[Held, Tensor]]] = []
        """For each group, what of it this rank holds, with the leaf that the twin steps."""
        for own, group in self._groups:
            pairs = []
            for value in group["params"]:
                held = self._by_id.get(id(value))
                if held is None or held.local.numel() == 0:
                    continue
                leaf = held.local.detach().requires_grad_()
                pairs.append((held, leaf))
                entry = optimizer.state.get(value)
                if entry:
                    self._twin.state[leaf] = cut(
                        entry,
                        held.shape,
                        held.start,
                        leaf.numel(),
                        backend="fsdp",
                        name=self._names[id(value)],
                        instead="ddp",
                    )
            own["params"] = [leaf for _, leaf in pairs]
            self._trained.append(pairs)
        listed = {id(value) for group in optimizer.param_groups for value in group["params"]}
        self._counted = [held for held in self._held if id(held.value) in listed]
        # One copy of it is enough; the session's optimizer no longer steps.
        optimizer.state.clear()

    # The window.

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        shared = self._shared
        shared.running = True
        try:
            loss.backward(gradient)
            shared.root._root_post_backward_final_callback()
            if shared.lockstep is not None:
                shared.lockstep.end()
        finally:
            shared.running = False
        if last:
            self._refuse_changed()
            if self.loss_scale != 1.0:
                unscale([part for held in self._held if (part := held.gradient) is not None], self.loss_scale)

    def _refuse_changed(self) -> None:
        for part, name, value in self._places:
            if part._parameters.get(name) is not value:
                raise InputError(
                    "backend 'fsdp': the module has other parameters than when it was prepared: write new values into "
                    "them (load_state_dict without assign=True), or close the session and prepare again"
                )
        versions = self._written()
        if versions != self._versions:
            held = next(h for h, now, then in zip(self._held, versions, self._versions, strict=True) if now != then)
            self._versions = versions
            raise UnsupportedError(
                f"backend 'fsdp' shards {self._names[id(held.value)]!r}, so that what was written into it while its "
                "module ran is lost: write outside of the forward, or use zero or ddp"
            )

    def _written(self) -> list[int]:
        return [held.value._version for held in self._held]

    def _local_gradients(self) -> list[Tensor]:
        return [gradient for held in self._counted if (gradient := held.gradient) is not None and gradient.numel()]

    # The step.

    def _settle(self) -> float:
        """Return the global norm of the averaged gradient, and learn which parameters have none. Collective, once."""
        if self._settled is not None:
            return self._settled
        seen = self._shared.seen
        some_absent = 0 in seen and not all(seen[held.index] for held in self._held if held.trains)
        self._settled, self._absent = settled(self._local_gradients(), seen, some_absent, self._device)
        return self._settled

    @torch.no_grad()
    def step(self) -> Update:
        norm = self._settle()
        moves = math.isfinite(norm)
        if moves:
            # The user hung them on the optimizer whose step this is.
            for hook in self.optimizer._optimizer_step_pre_hooks.values():
                hook(self.optimizer, (), {})
            self._update(norm)
            for hook in self.optimizer._optimizer_step_post_hooks.values():
                hook(self.optimizer, (), {})
        self._drop_gradients()
        return Update(moves, norm if self._want_norm else None)

    def _update(self, norm: float) -> None:
        stepper = self._twin
        self._attributes.follow()
        moved: list[Tensor] = []
        groups = []
        for (own, live), pairs in zip(self._groups, self._trained, strict=True):
            everything = own["params"]
            own.update(_settings(live))
            taken = []
            for held, leaf in pairs:
                if held.index not in self._absent and held.trains:
                    leaf.grad = held.gradient
                    taken.append(leaf)
            moved += taken
            groups.append((own, everything, taken))
        for group in self._shards.groups:
            # What is gathered from here on has the new values.
            group.reshard_now()
        if not moved:
            return
        if self._max_norm is not None and norm + 1e-6 > self._max_norm:
            torch._foreach_mul_(gradients(moved), self._max_norm / (norm + 1e-6))
        try:
            for own, _, taken in groups:
                own["params"] = taken
            stepper.step()
        finally:
            for own, everything, _ in groups:
                own["params"] = everything
            for leaf in moved:
                leaf.grad = None
        self._attributes.give_back()

    def _drop_gradients(self) -> None:
        for group in self._shards.groups:
            group.drop()
        for _, _, value in self._places:
            if id(value) not in self._by_id:
                value.grad = None
        self._shared.seen[:] = bytes(len(self._shared.seen))
        self._settled = None

    # What is whole.

    def full_gradients(self) -> dict[str, Tensor]:
        self._settle()
        found: dict[str, Tensor] = {}
        for held in self._held:
            if held.index in self._absent or not held.trains:
                continue
            padded = torch.zeros_like(held._sharded_param_data)
            gradient = held.gradient
            if gradient is not None:
                padded[: gradient.numel()] = gradient
            found[self._names[id(held.value)]] = self._joined(held, padded)
        return found

    def _joined(self, held: Held, padded: Tensor) -> Tensor:
        return whole(padded.to(self._device))[: held.shape.numel()].view(held.shape).to("cpu", copy=True)

    def gradient_shards(self) -> list[Shard]:
        self._settle()
        return [
            Shard(self._names[id(held.value)], held.start, gradient)
            for held in self._held
            if held.index not in self._absent and (gradient := held.gradient) is not None and gradient.numel()
        ]

    def full_weights(self) -> dict[str, Tensor]:
        self._reading = True
        try:
            state = self.model.state_dict(keep_vars=True)
        finally:
            self._reading = False
        found: dict[int, Tensor] = {}
        weights: dict[str, Tensor] = {}
        for name, value in state.items():
            held = self._by_id.get(id(value))
            if id(value) not in found:
                # One parameter at a time: the extra memory is the copy that was asked for.
                found[id(value)] = (
                    value.detach().to("cpu", copy=True)
                    if held is None
                    else self._joined(held, held._sharded_param_data)
                )
            weights[name] = found[id(value)]
        return weights

    def _refuse_empty(self, part: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._shared.whole and not self._reading:
            raise UnsupportedError(
                "backend 'fsdp' shards the parameters, and state_dict would find them empty: take "
                "session.full_weights(), or call it within session.evaluate(), on every rank"
            )

    def _refuse_assign(self, part: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise UnsupportedError(
                "backend 'fsdp' shards the parameters, and load_state_dict(assign=True) would put others in their "
                "place: load without assign=True"
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        shared, groups = self._shared, self._shards.groups
        if shared.whole:
            # Within another such context.
            yield
            return
        self._shards.exactly(True)
        try:
            for group in groups:
                group.gather_now()
            shared.whole = True
            versions = self._written()
            yield
        finally:
            shared.whole = False
            for group in groups:
                group.reshard_now()
            self._shards.exactly(False)
        if versions != self._written():
            raise UnsupportedError(
                "backend 'fsdp' shards the parameters, so that what is written into them within session.evaluate() is "
                "lost: write outside of it"
            )

    # State.

    @property
    def stepper(self) -> Optimizer:
        return self._twin

    def weight_shards(self) -> list[Shard]:
        return [Shard(self._names[id(held.value)], held.start, held.local) for held in self._held if held.local.numel()]

    def state_shards(self) -> list[Shard]:
        return [Shard(self._names[id(held.value)], held.start, leaf) for pairs in self._trained for held, leaf in pairs]

    def restart(self) -> None:
        self._shared.whole = False
        self._shared.running = False
        self._shared.root._reset_iter_state()
        for group in self._shards.groups:
            group.reshard_now()
        self._shards.exactly(False)
        self._drop_gradients()
        if self._shared.lockstep is not None:
            self._shared.lockstep.restart()

    def close(self) -> None:
        if self._world_size > 1 and broken():
            self._shards.detach()
            raise StateError(
                "backend 'fsdp' can't give the weights back, since the ranks parted in the midst of a collective: go "
                "on from a checkpoint in new processes"
            )
        self.restart()
        self._shards.give_back()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
