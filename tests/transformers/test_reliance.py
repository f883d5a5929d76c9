"""What shardkit.transformers relies on in transformers and accelerate, so that an upgrade that changes it says so.

A failure here isn't a defect by itself: it names a place of the library to read, and the place of ours that goes by it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
from accelerate.optimizer import AcceleratedOptimizer

from shardkit.transformers import _accelerator, _checkpoints, _trainer
from tests.transformers.tiny import transformers

ANSWERED = {
    "prepare": "opens the session over a model and its optimizer",
    "prepare_model": "evaluates before any training",
    "backward": "is the session's",
    "clip_grad_norm_": "gives what the step fills with the norm; the step clips",
    "no_sync": "has no effect: the session knows which pass is the last",
    "get_state_dict": "gives the whole weights",
    "optimizer_step_was_skipped": "reads step_was_skipped of the session's optimizer",
    "sync_gradients": "is what the Trainer sets, and tells the session which pass is the last",
    "gradient_state": "holds it",
    "end_training": "ends the session first",
}
LEFT = {
    "_models": "tells whether anything was prepared",
    "num_processes": "counts the ranks",
    "distributed_type": "isn't DEEPSPEED, since no plugin of accelerate's is set",
    "state": "holds the plugins of accelerate's, of which none is set",
    "scaler": "is None, since accelerate is asked for no mixed precision",
    "parallelism_config": "is refused among the arguments",
    "free_memory": "forgets what was prepared; the session stays open",
    "unwrap_model": "finds the module in what wraps it",
    "gather": "gathers over the default process group",
    "gather_for_metrics": "does that, and leaves out what filled the last batch",
    "pad_across_processes": "pads to the longest rank's",
    "deepspeed_ulysses_dl_adapter": "isn't reached without a parallelism_config",
    "maybe_context_parallel": "isn't reached without a parallelism_config",
}
"""What the Trainer asks of its accelerator: what a session answers, and what it needn't."""


def _used(*modules: Any) -> set[str]:
    """Return the names that are taken from ``self.accelerator`` in the source of modules."""
    return {
        node.attr
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.accelerator"
    }


def test_the_trainer_asks_nothing_new_of_its_accelerator() -> None:
    new = _used(transformers.trainer, transformers.trainer_seq2seq) - {*ANSWERED, *LEFT}
    assert not new, (
        f"transformers {transformers.__version__} uses self.accelerator's {sorted(new)}, which it didn't: look where, "
        "and whether a session must answer it (shardkit/transformers/_accelerator.py); then add it here"
    )


def test_the_trainer_still_asks_what_a_session_answers() -> None:
    gone = {*ANSWERED, *LEFT} - _used(transformers.trainer, transformers.trainer_seq2seq)
    assert not gone, (
        f"transformers {transformers.__version__} no longer uses self.accelerator's {sorted(gone)}: look what it does "
        "in its place, and whether that reaches the session (shardkit/transformers/_accelerator.py)"
    )


def _overridden(ours: type, theirs: type) -> list[tuple[Any, Any, str]]:
    return [
        (getattr(ours, name), getattr(theirs, name), f"{theirs.__name__}.{name}")
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and not name.startswith("__") and hasattr(theirs, name)
    ]


ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the parameters by name and kind; those that take any number go by any name."""
    return [
        ("..." if parameter.kind in ANYTHING else name, parameter.kind)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


OVERRIDDEN = [
    *_overridden(_trainer._OverSession, transformers.Trainer),
    *_overridden(_checkpoints.Checkpoints, transformers.Trainer),
    *_overridden(_accelerator.Accelerator, accelerate.Accelerator),
    *_overridden(_accelerator.SessionOptimizer, AcceleratedOptimizer),
]


@pytest.mark.parametrize(("ours", "theirs", "name"), OVERRIDDEN, ids=[name for *_, name in OVERRIDDEN])
def test_what_is_overridden_takes_the_same_arguments(ours: Any, theirs: Any, name: str) -> None:
    refuses = [kind for _, kind in _parameters(ours)[1:]] == list(ANYTHING)
    assert refuses or _parameters(ours) == _parameters(theirs), (
        f"{name} takes other arguments than ours ({inspect.signature(theirs)}): read it, and let ours take them"
    )


def test_what_is_overridden_is_still_there() -> None:
    found = {name for *_, name in OVERRIDDEN}
    needed = {
        *(
            f"Trainer.{name}"
            for ours in (_trainer._OverSession, _checkpoints.Checkpoints)
            for name, source in _functions(ours)
            if f"super().{name}" in source
        ),
        *(
            f"Accelerator.{name}"
            for name, _ in _functions(_accelerator.Accelerator)
            if name[0] != "_" and name != "end"
        ),
        *(f"AcceleratedOptimizer.{name}" for name, _ in _functions(_accelerator.SessionOptimizer)),
    }
    assert not needed - found, (
        f"{sorted(needed - found)} is no method of the library any more: what called it calls another one now, which "
        "is to be overridden in its place"
    )


def _functions(cls: type) -> list[tuple[str, str]]:
    return [
        (name, inspect.getsource(value))
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("__")
    ]


ORDERS: dict[str, tuple[Any, list[str], str]] = {
    "a session is opened before the schedule is made": (
        transformers.Trainer._prepare_for_training,
        [
            "self.create_optimizer",
            "self.accelerator.prepare",
            "self.create_scheduler",
            "self._load_optimizer_and_scheduler",
        ],
        "Accelerator.prepare",
    ),
    "a training is prepared, and then said to be its model": (
        transformers.Trainer._inner_training_loop,
        [
            "self.accelerator.free_memory",
            "self.get_train_dataloader",
            "self._prepare_for_training",
            "self.callback_handler.on_train_begin",
            "self._run_epoch",
            "self._finalize_training",
        ],
        "_OverSession._prepare_for_training",
    ),
    "the last pass of a window is marked before it runs": (
        transformers.Trainer._run_epoch,
        ["self.accelerator.gradient_state._set_sync_gradients", "self.training_step"],
        "Accelerator.backward",
    ),
    "a step is clipped, made, and only then scheduled and dropped": (
        transformers.Trainer._run_epoch,
        [
            "self.training_step",
            "self.floating_point_ops",
            "self._clip_grad_norm",
            "self._get_grad_norm",
            "self.callback_handler.on_pre_optimizer_step",
            "self.optimizer.step",
            "self.callback_handler.on_optimizer_step",
            "self.lr_scheduler.step",
            "model.zero_grad",
            "self.callback_handler.on_step_end",
            "self._maybe_log_save_evaluate",
        ],
        "SessionOptimizer.step",
    ),
    "a loss is computed, and given to backward once": (
        transformers.Trainer.training_step,
        ["self.compute_loss", "self.accelerator.backward"],
        "Accelerator.backward",
    ),
    "the norm is asked of the accelerator": (
        transformers.Trainer._clip_grad_norm,
        ["self._has_mixed_mesh_grads", "self.accelerator.clip_grad_norm_"],
        "Accelerator.clip_grad_norm_",
    ),
    "an accelerator is made of its arguments": (
        transformers.Trainer.create_accelerator_and_postprocess,
        ["self._build_accelerator_args", "Accelerator"],
        "Accelerator.over",
    ),
    "a model is prepared for an evaluation before any training": (
        transformers.Trainer.evaluation_loop,
        ["self._wrap_model", "self.accelerator.prepare_model", "model.eval", "self.prediction_step"],
        "Accelerator.prepare_model",
    ),
}
"""Calls that come in an order, where, and what of ours goes by it."""


def _calls(function: Any) -> list[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]


@pytest.mark.parametrize("what", ORDERS)
def test_the_librarys_loop_keeps_its_order(what: str) -> None:
    function, expected, ours = ORDERS[what]
    rest = iter(_calls(function))
    missing = [name for name in expected if not any(call == name for call in rest)]
    assert not missing, (
        f"{what}: not so any more, since {function.__qualname__} doesn't call {missing[0]} behind what came before it "
        f"in {expected}; {ours} goes by that"
    )


SAID = {
    "the loss of a window without counts is divided by its length": (
        transformers.Trainer.training_step,
        "loss = loss / self.current_gradient_accumulation_steps",
    ),
    "a loss by the tokens of all ranks is multiplied by their number": (
        transformers.Trainer.compute_loss,
        "loss_scale = self.accelerator.num_processes // self.get_tp_size()",
    ),
    "the model is prepared together with its optimizer": (
        transformers.Trainer._prepare_for_training,
        "model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)",
    ),
    "whether the library looks for meshes is found out once": (
        transformers.Trainer._has_mixed_mesh_grads,
        "if self._mixed_mesh_grads is None:",
    ),
    "operations are counted by the elements of the input": (
        transformers.Trainer.floating_point_ops,
        "inputs[main_input].numel() * self.model.num_parameters(exclude_embeddings=True)",
    ),
    "a schedule that isn't ours to step is stepped unless the step was skipped": (
        transformers.Trainer._run_epoch,
        "if not self.accelerator.optimizer_step_was_skipped:",
    ),
    "a skipped step is asked of the optimizers": (
        accelerate.Accelerator.optimizer_step_was_skipped.fget,
        "optimizer.step_was_skipped",
    ),
}
"""What is written in a place of the library's."""


@pytest.mark.parametrize("what", SAID)
def test_the_library_still_says_it(what: str) -> None:
    function, text = SAID[what]
    source = " ".join(inspect.getsource(function).split())
    assert text in source, f"{what}: {function.__qualname__} doesn't say {text!r} any more; read what it does now"


def test_an_accelerator_has_what_the_session_reads_and_writes() -> None:
    source = inspect.getsource(accelerate.Accelerator.__init__)
    for name in ("_models", "_optimizers", "gradient_state", "state"):
        assert f"self.{name}" in source, f"accelerate {accelerate.__version__} has no Accelerator.{name} any more"
    assert isinstance(accelerate.Accelerator.device, property)
    assert "dynamo_plugin" in inspect.getsource(accelerate.state.AcceleratorState)


def test_arguments_have_what_is_read_and_refused() -> None:
    names = set(transformers.TrainingArguments.__dataclass_fields__)
    read = (
        "gradient_accumulation_steps max_grad_norm fp16 bf16 deepspeed fsdp parallelism_config fp16_full_eval "
        "bf16_full_eval ddp_bucket_cap_mb ddp_static_graph auto_find_batch_size"
    )
    gone = {*read.split()} - names
    assert not gone, f"{sorted(gone)} are no arguments any more: shardkit/transformers/_arguments.py goes by them"
    source = inspect.getsource(transformers.TrainingArguments)
    for name in ("_n_gpu", "deepspeed_plugin", "mixed_precision", "world_size"):
        assert name in source, f"TrainingArguments has no {name} any more: shardkit/transformers goes by it"
