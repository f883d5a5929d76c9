"""Small trainings, each of which shows one behaviour of a Trainer, by the library's own or by ours under a flag.

Each function takes a :class:`Side` and returns what it saw, as numbers, strings, lists and tensors. A launch runs many
of them one after another, so that it costs little.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import shardkit.transformers
from tests.transformers import tiny
from tests.transformers.tiny import transformers


@dataclass(frozen=True)
class Side:
    """Whose Trainer is looked at: the library's own, or ours under a flag."""

    folder: str
    flags: dict[str, Any] | None
    """None for the library's own."""

    @property
    def module(self) -> Any:
        return transformers if self.flags is None else shardkit.transformers

    def args(self, kind: str = "TrainingArguments", **arguments: Any) -> Any:
        """Return arguments of small trainings: 2 samples a micro-batch, 2 of them a step, clipping, one epoch."""
        settings = {
            "output_dir": self.folder,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "learning_rate": 1e-2,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        return getattr(self.module, kind)(**{**settings, **(self.flags or {}), **arguments})

    def trainer(
        self,
        model: Any = "t5",
        *,
        kind: str = "Trainer",
        base: Callable[[type], type] | None = None,
        given: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a Trainer over a model or the tiny one of that name.

        ``given`` is what the Trainer takes beside its arguments. ``base`` makes a subclass of its class.
        """
        name = model if isinstance(model, str) else None
        made = {"train_dataset": tiny.samples(22), "eval_dataset": tiny.samples(7, seed=1), **(given or {})}
        if "model_init" not in made:
            made["model"] = tiny.MODELS[name]() if name else model
        cls = getattr(self.module, kind)
        cls = cls if base is None else base(cls)
        args = self.args(kind.replace("Trainer", "TrainingArguments"), **arguments)
        trainer = cls(args=args, **made)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


Seen = dict[str, Any]
Behaviour = Callable[[Side], Seen]


def steps(trainer: Any) -> Seen:
    """Return what the log says of each step."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "rates": [entry["learning_rate"] for entry in logged],
        "epochs": [entry["epoch"] for entry in logged],
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
    }


def trained(side: Side, *positional: Any, **settings: Any) -> Seen:
    trainer = side.trainer(*positional, **settings)
    output = trainer.train()
    return {**steps(trainer), "train_loss": output.training_loss}


def sequences(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return samples with the decoder's input, for losses that are made outside of the model."""
    made = tiny.samples(count, seed)
    for item in made:
        item["decoder_input_ids"] = torch.cat([torch.zeros(1, dtype=torch.int64), item["input_ids"][:-1]])
    return made


# Models beside those of the library.


class Line(nn.Module):
    """Predicts the sum of four numbers; its output is a tuple, a dict or, with ``None``, without a loss."""

    def __init__(self, output: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.output = output

    def forward(self, values: Tensor, labels: Tensor | None = None, others: Tensor | None = None) -> Any:
        found = self.head(torch.tanh(self.inner(values)))
        if labels is None or self.output == "none":
            return {"logits": found} if self.output != "tuple" else (found,)
        loss = (found - labels).square().mean()
        if others is not None:
            loss = loss + (found - others).abs().mean()
        return (loss, found) if self.output == "tuple" else {"loss": loss, "logits": found}


class Losing(nn.Module):
    """Is a line whose loss is what a sample says it is, where it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    def forward(self, values: Tensor, labels: Tensor, factor: Tensor) -> Any:
        out = self.line(values, labels)
        return {"loss": out["loss"] * factor.mean(), "logits": out["logits"]}


def points(count: int, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 4, generator=generator)
    return [
        {"values": row, "labels": row.sum()[None], **{name: torch.tensor([float(at)]) for name, at in more.items()}}
        for row in values
    ]


def line(side: Side, model: nn.Module | None = None, count: int = 22, **settings: Any) -> Any:
    given = {"train_dataset": points(count), "eval_dataset": points(7, 1), **settings.pop("given", {})}
    return side.trainer(Line() if model is None else model, given=given, **settings)


# Training.


def same_seed_twice(side: Side) -> Seen:
    first, second = (trained(side, tiny.t5(dropout=0.2)) for _ in range(2))
    return {"first": first["losses"], "equal": first == second}


def another_seed(side: Side) -> Seen:
    return {"first": trained(side, tiny.t5(dropout=0.2), seed=7)["losses"]}


def model_made_by_a_function(side: Side) -> Seen:
    trainer = side.trainer(given={"model_init": lambda: tiny.t5()})
    trainer.train()
    first = steps(trainer)
    trainer.train()
    return {"first": first, "equal": first == steps(trainer)}


def short_windows(side: Side) -> Seen:
    return {
        "epoch": trained(side, gradient_accumulation_steps=4),
        "most": trained(side, gradient_accumulation_steps=4, max_steps=3),
        "half": trained(side, gradient_accumulation_steps=4, num_train_epochs=1.5),
        "none": trained(side, gradient_accumulation_steps=1, max_steps=3),
        "gpt2": trained(side, "gpt2", gradient_accumulation_steps=4),
    }


def short_windows_without_token_counts(side: Side) -> Seen:
    trainer = line(side, gradient_accumulation_steps=4, num_train_epochs=2)
    trainer.train()
    return steps(trainer)


def no_clipping(side: Side) -> Seen:
    return trained(side, max_grad_norm=0.0)


def frozen_parameters(side: Side) -> Seen:
    model = tiny.t5()
    model.shared.weight.requires_grad_(False)
    model.encoder.requires_grad_(False)
    return trained(side, model, weight_decay=0.1)


def own_optimizer_and_schedule(side: Side) -> Seen:
    model = tiny.t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = side.trainer(model, given={"optimizers": (optimizer, schedule)})
    trainer.train()
    return {**steps(trainer), "last": schedule.get_last_lr()}


def own_optimizer_class(side: Side) -> Seen:
    chosen = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5})
    return trained(side, given={"optimizer_cls_and_kwargs": chosen})


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 2}},
    "reduce_lr_on_plateau": {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_kwargs": {"patience": 0}},
    "greedy": {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_kwargs": {"patience": 0}},
}


def schedules(side: Side) -> Seen:
    seen = {}
    for name, more in SCHEDULES.items():
        trainer = line(side, lr_scheduler_type=name, warmup_steps=1, num_train_epochs=2, **more)
        trainer.train()
        seen[name] = steps(trainer)
    return seen


OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")


def optimizers(side: Side) -> Seen:
    def one(name: str) -> Seen:
        trainer = line(side, optim=name)
        trainer.train()
        return steps(trainer)

    return {name: attempt(lambda name=name: one(name)) for name in OPTIMIZERS}


def label_smoothing(side: Side) -> Seen:
    seen = {}
    for name in tiny.MODELS:
        given = {"train_dataset": sequences(22), "eval_dataset": sequences(7, 1)}
        trainer = side.trainer(name, label_smoothing_factor=0.1, given=given)
        trainer.train()
        seen[name] = {**steps(trainer), "eval": trainer.evaluate()["eval_loss"]}
    return seen


def _loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def own_loss_function(side: Side) -> Seen:
    return trained(side, given={"compute_loss_func": _loss, "train_dataset": sequences(22)})


def averaged_by_rank(side: Side) -> Seen:
    return {
        **trained(side, average_tokens_across_devices=False),
        "own": trained(
            side,
            given={"compute_loss_func": _loss, "train_dataset": sequences(22)},
            average_tokens_across_devices=False,
        ),
    }


def subclasses(side: Side) -> Seen:
    def own_loss(cls: Any) -> type:
        class Own(cls):  # type: ignore[misc]
            loss_is_scaled_for_ga = False

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                outputs = model(**inputs)
                loss = 2 * outputs.loss
                return (loss, outputs) if return_outputs else loss

        return Own

    def own_step(cls: Any) -> type:
        class Own(cls):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
                inputs["labels"][:, 0] = -100
                return super().training_step(model, inputs, num_items_in_batch)

        return Own

    def own_loader(cls: Any) -> type:
        class Own(cls):  # type: ignore[misc]
            def get_train_dataloader(self) -> DataLoader[Any]:
                return DataLoader(
                    self.train_dataset,
                    batch_size=3,
                    sampler=DistributedSampler(self.train_dataset, shuffle=False),  # type: ignore[arg-type]
                    collate_fn=self.data_collator,
                )

        return Own

    def own_optimizer(cls: Any) -> type:
        class Own(cls):  # type: ignore[misc]
            def create_optimizer(self, model: Any = None) -> Any:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
                return self.optimizer

        return Own

    return {made.__name__: trained(side, base=made) for made in (own_loss, own_step, own_loader, own_optimizer)}


def checkpointed_activations(side: Side) -> Seen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "new": trained(side, "gpt2", activation_checkpointing=True),
            "old": trained(side, "gpt2", gradient_checkpointing=True),
            "reentrant": trained(
                side, "gpt2", activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}
            ),
            "without": trained(side, "gpt2"),
        }


def bf16(side: Side) -> Seen:
    trainer = side.trainer(bf16=True, num_train_epochs=2)
    trainer.train()
    return {**steps(trainer), "eval": trainer.evaluate()["eval_loss"]}


def fp16(side: Side) -> Seen:
    trainer = side.trainer(fp16=True, num_train_epochs=2)
    trainer.train()
    return {**steps(trainer), "eval": trainer.evaluate()["eval_loss"]}


def noisy_embeddings(side: Side) -> Seen:
    trainer = side.trainer("gpt2", neftune_noise_alpha=5.0)
    trainer.train()
    hooks = trainer.model.get_input_embeddings()._forward_hooks.values()
    left = [hook.__name__ for hook in hooks if "neftune" in getattr(hook, "__name__", "")]
    return {**steps(trainer), "eval": trainer.evaluate()["eval_loss"], "left": left}


def compiled(side: Side) -> Seen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = line(side, torch_compile=True, torch_compile_backend="eager")
        trainer.train()
        return {**steps(trainer), "eval": trainer.evaluate()["eval_loss"]}


# Data.


def grouped_by_length(side: Side) -> Seen:
    data = [
        {key: value[: 3 + number % 4] for key, value in item.items()} for number, item in enumerate(tiny.samples(22))
    ]
    return trained(
        side,
        train_sampling_strategy="group_by_length",
        given={"train_dataset": data, "data_collator": pad, "eval_dataset": None},
    )


def pad(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate samples of different lengths."""
    fills = {"input_ids": 0, "labels": -100}
    return {
        key: nn.utils.rnn.pad_sequence([item[key] for item in items], batch_first=True, padding_value=fills[key])
        for key in fills
    }


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 22) -> None:
        self.items = tiny.samples(count)

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.items)


def streams(side: Side) -> Seen:
    return {
        "endless": trained(side, given={"train_dataset": Stream()}, max_steps=5),
        "sized": trained(side, given={"train_dataset": Sized()}),
        "uneven": trained(side, given={"train_dataset": Sized(13)}),
        "evaluated": attempt(lambda: _evaluated(side, Sized(7))),
    }


def _evaluated(side: Side, data: Any) -> Seen:
    trainer = side.trainer()
    return {"loss": trainer.evaluate(data)["eval_loss"]}


def few_samples(side: Side) -> Seen:
    return {
        "dropped": trained(side, dataloader_drop_last=True, per_device_train_batch_size=4),
        "fewer": trained(side, given={"train_dataset": tiny.samples(3)}, per_device_train_batch_size=8),
        "one": trained(side, given={"train_dataset": tiny.samples(1)}, num_train_epochs=2),
    }


def columns(side: Side) -> Seen:
    data = [{**item, "unknown": torch.zeros(3)} for item in tiny.samples(22)]
    removed = trained(side, given={"train_dataset": data})
    kept = attempt(
        lambda: line(side, given={"train_dataset": points(22, unknown=1)}, remove_unused_columns=False).train()
    )
    return {"removed": removed, "kept": str(kept.get("error"))}


def outputs(side: Side) -> Seen:
    seen = {}
    for output in ("dict", "tuple"):
        trainer = line(side, Line(output))
        trainer.train()
        found = trainer.predict(points(5, 2))
        seen[output] = {**steps(trainer), "found": numbers(found.predictions), "labels": numbers(found.label_ids)}
    return seen


def several_labels(side: Side) -> Seen:
    given = {"train_dataset": points(22, others=1), "eval_dataset": points(7, 1, others=1)}
    trainer = line(side, Line(), given=given, label_names=["labels", "others"])
    trainer.train()
    found = trainer.predict(points(5, 2, others=3))
    return {
        **steps(trainer),
        "found": numbers(found.predictions),
        "labels": [numbers(part) for part in found.label_ids],
        "loss": found.metrics["test_loss"],
    }


def numbers(found: Any) -> list[float]:
    return [float(number) for number in numpy.asarray(found).flatten()]


# Evaluation.


def right(found: Any) -> dict[str, float]:
    """Return metrics of what was found: the share of words that are right, and how much was handed over."""
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    words = logits if logits.ndim == 2 else logits.argmax(-1)
    labels = found.label_ids
    seen = {"right": float((words == labels).sum()), "rows": len(labels)}
    if found.losses is not None:
        seen["mean"] = float(found.losses.mean())
    if found.inputs is not None:
        seen["inputs"] = float(found.inputs.sum())
    return seen


class Counting:
    """Counts over the batches of an evaluation."""

    def __init__(self) -> None:
        self.right, self.calls = 0.0, 0

    def __call__(self, found: Any, compute_result: bool) -> dict[str, float]:
        logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        self.right += float((logits.argmax(-1) == found.label_ids).sum())
        self.calls += 1
        return {"right": self.right, "calls": float(self.calls)} if compute_result else {}


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without those that are times."""
    timed = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(timed)}


def evaluated_before_training(side: Side) -> Seen:
    trainer = side.trainer(given={"compute_metrics": right})
    seen = {"before": timeless(trainer.evaluate())}
    if side.flags is None:
        # The library's own doesn't average gradients over ranks once it has evaluated: it has no reference for this.
        trainer = side.trainer(given={"compute_metrics": right})
    trainer.train()
    return {**seen, **steps(trainer), "after": timeless(trainer.evaluate())}


def evaluated_in_the_midst(side: Side) -> Seen:
    trainer = side.trainer(
        given={"compute_metrics": right, "eval_dataset": {"a": tiny.samples(7, 1), "b": tiny.samples(4, 2)}},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        include_for_metrics=["loss", "inputs"],
    )
    trainer.train()
    evaluations = [timeless(entry) for entry in trainer.state.log_history if any("eval" in key for key in entry)]
    return {**steps(trainer), "evaluations": evaluations}


def how_it_evaluates(side: Side) -> Seen:
    trainer = side.trainer(given={"compute_metrics": right})
    trainer.train()
    seen = {"plain": timeless(trainer.evaluate())}
    trainer.args.eval_accumulation_steps = 1
    seen["accumulated"] = timeless(trainer.evaluate())
    trainer.args.prediction_loss_only = True
    seen["loss only"] = timeless(trainer.evaluate())
    trainer.args.prediction_loss_only = False
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits[0].argmax(-1)
    seen["preprocessed"] = timeless(trainer.evaluate())
    found = trainer.predict(tiny.samples(5, seed=3))
    seen["predicted"] = {"words": numbers(found.predictions), "metrics": timeless(found.metrics)}
    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = None, Counting()
    trainer.args.batch_eval_metrics = True
    seen["by batch"] = timeless(trainer.evaluate())
    trainer.args.batch_eval_metrics, trainer.compute_metrics = False, right
    data = [
        {key: value[: 4 + number % 4] for key, value in item.items()} for number, item in enumerate(tiny.samples(7))
    ]
    trainer.data_collator = pad
    found = trainer.predict(data)
    seen["lengths"] = {"logits": numbers(found.predictions[0]), "labels": numbers(found.label_ids)}
    trainer.args.eval_use_gather_object = True
    seen["as objects"] = timeless(trainer.evaluate(tiny.samples(5, 4)))
    return seen


def generated(side: Side) -> Seen:
    def trainer(**more: Any) -> Any:
        settings = {"predict_with_generate": True, "generation_max_length": 9, **more}
        return side.trainer(kind="Seq2SeqTrainer", **settings)

    data = tiny.samples(5, seed=3)
    seen = {"untrained": _words(trainer().predict(data))}
    for name, more in {"greedy": {}, "bf16": {"bf16": True}}.items():
        made = trainer(**more)
        made.train()
        seen[name] = _words(made.predict(data))
        if name == "greedy":
            seen["beams"] = _words(made.predict(data, num_beams=2))
            seen["evaluated"] = timeless(made.evaluate(max_length=7))
            # One rank's generation ends before the other's.
            most = 3 + 4 * made.args.process_index

            def enough(words: Tensor, scores: Any, most: int = most) -> Tensor:
                return torch.full((len(words),), words.shape[1] >= most)

            seen["uneven"] = _words(made.predict(data, stopping_criteria=[enough]))
            seen["goes on"] = made.train().training_loss
    return seen


def _words(found: Any) -> Seen:
    return {"words": numbers(found.predictions), "rows": len(found.predictions), "metrics": timeless(found.metrics)}


# Callbacks, the log, counts.


class Noting(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes the events, and what the callbacks are given at them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.seen: list[Any] = []
        self.was: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("pre_optimizer_step")
        self.was = weights(given)
        self.seen.append([group["lr"] for group in given["optimizer"].param_groups])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("optimizer_step")
        now = weights(given)
        self.seen.append(bool((now != self.was).any()))
        self.seen.append(float(now.abs().sum()))


def weights(given: dict[str, Any]) -> Tensor:
    """Return the whole weights of the model that a callback is given, under any strategy."""
    session = getattr(given["optimizer"], "session", None)
    found = given["model"].state_dict() if session is None else session.full_weights()
    return torch.cat([value.detach().flatten().clone() for _, value in sorted(found.items())])


def _event(name: str) -> Any:
    def note(self: Noting, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append(name)

    return note


for _event_name in (
    *("init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "substep_end", "step_end"),
    *("evaluate", "predict", "log", "prediction_step", "save"),
):
    setattr(Noting, f"on_{_event_name}", _event(_event_name))


class Stopping(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops once, behind a step."""

    def __init__(self, step: int, what: str, event: str = "on_step_end") -> None:
        self.step, self.what, self.done = step, what, False
        setattr(self, event, self._stop)

    def _stop(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        if state.global_step == self.step and not self.done:
            self.done = True
            setattr(control, self.what, True)
        return control


class Halving(transformers.TrainerCallback):  # type: ignore[misc]
    """Halves the learning rate of the first group, and raises its decay, behind a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        group = given["optimizer"].param_groups[0]
        group["lr"] /= 2
        group["weight_decay"] += 0.1


def events(side: Side) -> Seen:
    noting = Noting()
    trainer = side.trainer(given={"callbacks": [noting]}, eval_strategy="epoch", num_train_epochs=2)
    trainer.train()
    trainer.predict(tiny.samples(2))
    return {"events": noting.events, "seen": noting.seen}


def stops(side: Side) -> Seen:
    seen = {}
    for what in ("should_training_stop", "should_epoch_stop"):
        seen[what] = trained(side, given={"callbacks": [Stopping(1, what)]}, num_train_epochs=2)
    for what in ("should_training_stop", "should_epoch_stop"):
        callback = Stopping(1, what, "on_substep_end")
        trainer = side.trainer(given={"callbacks": [callback]}, num_train_epochs=2)
        trainer.train()
        seen[f"mid-window {what}"] = steps(trainer)
        trainer.train()
        seen[f"again after {what}"] = steps(trainer)
    early = transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    seen["early"] = trained(
        side, given={"callbacks": [early]}, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss"
    )
    return seen


def changed_groups(side: Side) -> Seen:
    return trained(side, given={"callbacks": [Halving()]}, lr_scheduler_type="constant", num_train_epochs=2)


def counts(side: Side) -> Seen:
    trainer = side.trainer(include_num_input_tokens_seen="all", logging_steps=2, logging_first_step=True)
    output = trainer.train()
    return {
        "flos": trainer.state.total_flos,
        "metric": output.metrics["total_flos"],
        "tokens": trainer.state.num_input_tokens_seen,
        "parameters": trainer.model.num_parameters(),
        "trainable": trainer.get_num_trainable_parameters() if hasattr(trainer, "get_num_trainable_parameters") else 0,
        "metrics": sorted(output.metrics),
        "rates": [output.metrics[name] > 0 for name in ("train_samples_per_second", "train_steps_per_second")],
        "log": [sorted(entry) for entry in trainer.state.log_history],
        "zero": trainer.is_world_process_zero(),
        "local": trainer.is_local_process_zero(),
        "main": trainer.args.process_index,
    }


def one_after_another(side: Side) -> Seen:
    """Two Trainers with a model each, and a third that goes on with the first one's model."""
    first = side.trainer()
    first.train()
    second = side.trainer("gpt2")
    second.train()
    third = side.trainer(first.model, max_steps=2)
    third.train()
    return {"first": steps(first), "second": steps(second), "third": steps(third)}


def trained_again(side: Side) -> Seen:
    trainer = side.trainer()
    trainer.train()
    first = steps(trainer)
    trainer.train()
    return {"first": first, "second": steps(trainer), "eval": trainer.evaluate()["eval_loss"]}


# What goes wrong.


def loaders_of_other_lengths(side: Side) -> Seen:
    def base(cls: Any) -> type:
        class Own(cls):  # type: ignore[misc]
            def get_train_dataloader(self) -> DataLoader[Any]:
                return self._loader(self.train_dataset, 12 - 4 * self.args.process_index)

            def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
                return self._loader(self.eval_dataset, 6 - 3 * self.args.process_index)

            def _loader(self, data: Any, count: int) -> DataLoader[Any]:
                return DataLoader(data[:count], batch_size=2, collate_fn=self.data_collator)

        return Own

    trainer = line(side, base=base)
    return {
        "before training": attempt(trainer.evaluate),
        "training": attempt(trainer.train),
        "evaluation": attempt(trainer.evaluate),
        "of so many steps": attempt(line(side, base=base, max_steps=5).train),
    }


def losses_not_finite(side: Side) -> Seen:
    """The loss of one sample of rank 0's is NaN, in the second of three steps."""
    data = points(22, factor=1)
    for number, item in enumerate(data):
        item["factor"] = torch.ones(1) * (torch.nan if number == 9 else 1)
    given = {"train_dataset": data, "eval_dataset": None}
    # In the order of the data, so that the step is known.
    trainer = line(side, Losing(), given=given, train_sampling_strategy="sequential")
    seen = {"raised": attempt(trainer.train), "until": steps(trainer)}
    assert side.flags is not None
    flag = side.flags["strategy"]
    skips = {"strategy": flag + ("," if ":" in flag else ":") + "on_nonfinite=skip"}
    trainer = line(Side(side.folder, skips), Losing(), given=given, train_sampling_strategy="sequential")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    seen["skipped"] = {**steps(trainer), "warned": [str(item.message) for item in warned]}
    session = trainer.session
    return {**seen, "moved": session.steps, "left out": session.skipped_steps}


class Bare(Line):
    """Is a line whose output is a tuple without a loss."""

    def forward(self, values: Tensor, labels: Tensor | None = None, others: Tensor | None = None) -> Any:
        return super().forward(values)["logits"][None]


def outputs_without_a_loss(side: Side) -> Seen:
    return {"dict": attempt(line(side, Line("none")).train), "tuple": attempt(line(side, Bare()).train)}


class Breaking(Line):
    """Breaks in the forward, or the backward, of its second call or another one."""

    def __init__(self, where: str, call: int = 2) -> None:
        super().__init__()
        self.where, self.call, self.calls = where, call, 0

    def forward(self, values: Tensor, labels: Tensor | None = None, others: Tensor | None = None) -> Any:
        self.calls += 1
        if self.calls == self.call and self.where == "forward":
            raise RuntimeError("broken")
        out = super().forward(values, labels)
        if self.calls == self.call:
            out["loss"].register_hook(_broken)
        return out


def _broken(gradient: Tensor) -> None:
    raise RuntimeError("broken")


def training_that_breaks(side: Side) -> Seen:
    seen: Seen = {}
    for where in ("forward", "backward"):
        trainer = line(side, Breaking(where))
        first = attempt(trainer.train)
        again = attempt(lambda trainer=trainer: (trainer.train(), steps(trainer))[1])
        seen[where] = {"first": first, "again": again}
    # The second step's, behind a checkpoint of the first.
    kept = Side(str(Path(side.folder, "broken")), side.flags)
    trainer = line(kept, Breaking("backward", call=4), save_strategy="steps", save_steps=1)
    seen["late"] = attempt(trainer.train)
    trainer.train(resume_from_checkpoint=str(Path(kept.folder, "checkpoint-1")))
    seen["resumed"] = steps(trainer)
    trainer = line(side)
    trainer.train()
    return {**seen, "whole": steps(trainer)}


def sessions_that_ended(side: Side) -> Seen:
    first = line(side)
    first.train()
    second = line(side, first.model)
    second.train()
    seen = {"taken": attempt(first.train)}
    second.session.close()
    seen["closed"] = attempt(second.train)
    second.end()
    whole = [value.numel() for value in second.model.parameters()]
    return {**seen, "whole": whole}


def odd_calls(side: Side) -> Seen:
    """What a subclass may ask of the accelerator, and a session can't do."""
    trainer = line(side)
    trainer.train()
    accelerator = trainer.accelerator
    return {
        "value": attempt(lambda: accelerator.clip_grad_value_(trainer.model.parameters(), 1.0)),
        "norm": attempt(lambda: accelerator.clip_grad_norm_(trainer.model.parameters(), 3.0)),
        "alone": attempt(lambda: accelerator.prepare(Line())),
        "unused": attempt(lambda: accelerator.prepare_model(Line())),
        "closure": attempt(lambda: trainer.optimizer.step(lambda: None)),
        "options": attempt(lambda: accelerator.backward(torch.zeros(()), retain_graph=True)),
    }


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or its error in words."""
    try:
        found = function()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return found if isinstance(found, dict) else {}


ALL: dict[str, Behaviour] = {
    function.__name__: function
    for function in (
        same_seed_twice,
        another_seed,
        model_made_by_a_function,
        short_windows,
        short_windows_without_token_counts,
        no_clipping,
        frozen_parameters,
        own_optimizer_and_schedule,
        own_optimizer_class,
        schedules,
        optimizers,
        label_smoothing,
        own_loss_function,
        averaged_by_rank,
        subclasses,
        checkpointed_activations,
        bf16,
        fp16,
        noisy_embeddings,
        compiled,
        grouped_by_length,
        streams,
        few_samples,
        columns,
        outputs,
        several_labels,
        evaluated_before_training,
        evaluated_in_the_midst,
        how_it_evaluates,
        generated,
        events,
        stops,
        changed_groups,
        counts,
        one_after_another,
        trained_again,
    )
}


WRONG: dict[str, Behaviour] = {
    function.__name__: function
    for function in (
        loaders_of_other_lengths,
        losses_not_finite,
        outputs_without_a_loss,
        training_that_breaks,
        odd_calls,
        sessions_that_ended,
    )
}


def look(folder: str, flags: dict[str, Any] | None, names: list[str]) -> dict[str, Seen]:
    """Return what each of the behaviours shows. Collective."""
    side = Side(str(Path(folder)), flags)
    return {name: attempt(lambda name=name: {**ALL, **WRONG}[name](side)) for name in names}
