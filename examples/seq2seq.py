r"""Fine-tune a model that reads one text and writes another, with the Trainer's flags --sharded_ddp and --deepspeed.

Alone, it trains a tiny T5 for a minute to put back the spaces of English phrases, which needs no download:

    python examples/seq2seq.py

On several processes, their memory shared out by FairScale; and with a model and data of your own:

    torchrun --nproc_per_node 2 examples/seq2seq.py --sharded_ddp
    torchrun --nproc_per_node 2 examples/seq2seq.py --sharded_ddp --model_name_or_path t5-large --data_dir wmt_en_ro \
        --task translation_en_to_ro --do_train --do_eval --do_predict --predict_with_generate

Your data is --data_dir with files train.source and train.target, val.* and test.*, one sample a line; or --train_file,
--validation_file and --test_file, with JSON lines or with columns (.csv, .tsv). Of each sample "source" and "target",
or the languages of --task, are read.

It writes to --output_dir: the model, train_results.json, eval_results.json, test_results.json, all_results.json, and
test_generations.txt, a line for each sample of the test data.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from shardkit.errors import InputError, ShardkitError
from shardkit.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

Pairs = list[tuple[str, str]]
"""Sources and their targets."""

Result = TypeVar("Result")


# Arguments


def described(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    _argument_group_name = "model"

    model_name_or_path: str | None = described("A folder or a name on the hub; without it, a T5 with random weights.")
    model_size: Literal["tiny", "small", "base", "large"] = described("Of the T5 with random weights.", "tiny")
    freeze_embeds: bool = described("Leave the embeddings, and those of positions, as they are.", False)


@dataclass
class DataArguments:
    _argument_group_name = "data"

    data_dir: str | None = described("A folder with train.source, train.target, val.* and test.*, a sample a line.")
    train_file: str | None = described("JSON lines, .csv or .tsv.")
    validation_file: str | None = described("As --train_file.")
    test_file: str | None = described("As --train_file.")
    task: str | None = described("Such as translation_en_to_ro: the model's settings for it, and the data's languages.")
    source_prefix: str | None = described("Put before each source; without it, what the model has for --task.")
    max_source_length: int = described("Sources are cut to so many tokens, as are targets for the loss.", 128)
    max_target_length: int = described("In training.", 128)
    val_max_target_length: int | None = described("In evaluation, also generated; without it, --max_target_length.")
    test_max_target_length: int | None = described("In prediction; without it, --val_max_target_length.")
    n_train: int = described("So many samples, the first ones; -1 takes all.", -1)
    n_val: int = described("As --n_train.", -1)
    n_test: int = described("As --n_train.", -1)


@dataclass
class Arguments(Seq2SeqTrainingArguments):
    _argument_group_name = "training"

    train_sampling_strategy: str = described("random, sequential, or group_by_length, as --sortish_sampler.", "random")
    overwrite_output_dir: bool = described("Train although --output_dir isn't empty.", False)

    def __post_init__(self) -> None:
        if self.train_sampling_strategy == "group_by_length":
            # Under this name evaluation would be shuffled, too, and with it the predictions.
            self.train_sampling_strategy, self.sortish_sampler = "random", True
        super().__post_init__()


OLD_NAMES: dict[str, dict[str, Any]] = {
    "--adam_eps": {"dest": "adam_epsilon", "type": float},
    "--evaluation_strategy": {"dest": "eval_strategy"},
    "--label_smoothing": {"dest": "label_smoothing_factor", "type": float},
    "--lr_scheduler": {"dest": "lr_scheduler_type"},
    "--group_by_length": {"dest": "sortish_sampler", "action": "store_true"},
    "--no_cuda": {"dest": "use_cpu", "action": "store_true"},
    "--predict": {"dest": "do_predict", "action": "store_true"},
    "--num_beams": {"dest": "generation_num_beams", "type": int},
    "--eval_beams": {"dest": "generation_num_beams", "type": int},
}
"""What arguments were called in 2021, or are for short."""

FROM_RANDOM_WEIGHTS = {
    "learning_rate": 3e-3,
    "num_train_epochs": 5.0,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "warmup_steps": 50,
    "logging_steps": 100,
}
"""Defaults without a trained model; the library's own are for fine-tuning one."""


def parser() -> HfArgumentParser:
    """Return what reads the command line: the names of today, and those of then."""
    made = HfArgumentParser(
        [ModelArguments, DataArguments, Arguments],
        usage="%(prog)s [--argument VALUE ...]     (--help lists them all)",
        description=__doc__,
        formatter_class=Help,
    )
    for old, settings in OLD_NAMES.items():
        made.add_argument(old, default=argparse.SUPPRESS, help=f"the same as --{settings['dest']}", **settings)
    # Without it, and without a GPU, the library takes each process of torchrun for one alone.
    made.set_defaults(use_cpu=not torch.accelerator.is_available())
    return made


def parse(words: list[str] | None = None) -> tuple[ModelArguments, DataArguments, Arguments]:
    """Return what a command line says; exit on one that can't be read."""
    reader = parser()
    given, unknown = reader.parse_known_args(words)
    if unknown:
        reader.error(f"unknown: {' '.join(unknown)}")
    if not (given.do_train or given.do_eval or given.do_predict):
        reader.set_defaults(do_train=True, do_eval=True, do_predict=True, predict_with_generate=True)
    if given.model_name_or_path is None:
        reader.set_defaults(**FROM_RANDOM_WEIGHTS)
    model, data, args = reader.parse_args_into_dataclasses(words, look_for_args_file=False)
    if data.val_max_target_length is None:
        data.val_max_target_length = data.max_target_length
    if data.test_max_target_length is None:
        data.test_max_target_length = data.val_max_target_length
    return model, data, args


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


# Data


def read(data: DataArguments, split: str) -> Pairs:
    """Return the pairs of a split, "train", "val" or "test".

    Raises:
        InputError: they aren't there, or are no pairs.
    """
    count = getattr(data, f"n_{split}")
    if count == 0 or count < -1:
        raise InputError(f"--n_{split} is a number of samples, or -1 for all of them, not {count}")
    files = {"train": data.train_file, "val": data.validation_file, "test": data.test_file}
    if data.data_dir is not None and any(files.values()):
        raise InputError("--data_dir and files of data can't be used together: leave one of them")
    if data.data_dir is not None:
        pairs = from_folder(Path(data.data_dir), split)
    elif any(files.values()):
        file = files[split]
        if file is None:
            raise InputError(
                f"the {split} data is asked for, and there is no --{split.replace('val', 'validation')}_file"
            )
        pairs = from_file(Path(file), data.task)
    else:
        pairs = phrases(split)
    return pairs if count == -1 else pairs[:count]


def from_folder(folder: Path, split: str) -> Pairs:
    """Return the pairs of two files whose lines belong together."""
    if not folder.is_dir():
        raise InputError(f"--data_dir {str(folder)!r} is no folder")
    source, target = (folder / f"{split}.{side}" for side in ("source", "target"))
    lines = [text_of(path).removesuffix("\n").split("\n") for path in (source, target)]
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} lines and {target} has {len(lines[1])}: each line of one belongs to the "
            "same line of the other"
        )
    return checked(list(zip(*lines, strict=True)), source)


def from_file(path: Path, task: str | None) -> Pairs:
    """Return the pairs of a file of JSON lines, or of columns."""
    text = text_of(path)
    if path.suffix in (".csv", ".tsv"):
        delimiter = "," if path.suffix == ".csv" else "\t"
        records: list[Any] = list(csv.DictReader(io.StringIO(text), delimiter=delimiter, restkey="more"))
    elif path.suffix in (".json", ".jsonl"):
        records = []
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"line {number} of {path} isn't JSON, one object a line: {error}") from None
    else:
        raise InputError(f"{path} ends with none of .json, .jsonl, .csv and .tsv")
    languages = re.fullmatch(r"translation_(\w+)_to_(\w+)", task or "")
    keys = ("source", "target") if languages is None else (languages[1], languages[2])
    pairs = []
    for number, record in enumerate(records, 1):
        sample = record.get("translation", record) if isinstance(record, dict) else None
        sample = sample if isinstance(sample, dict) else {}
        source, target = (
            sample.get(key, sample.get(side)) for key, side in zip(keys, ("source", "target"), strict=True)
        )
        if not isinstance(source, str) or not isinstance(target, str):
            raise InputError(
                f"sample {number} of {path} has no texts {keys[0]!r} and {keys[1]!r}, it has {list(sample)}: "
                "--task translation_en_to_ro, for example, says which languages are source and target"
            )
        if isinstance(sample.get("more"), list):
            raise InputError(f"sample {number} of {path} has more columns than the first line names: quote its texts")
        pairs.append((source, target))
    return checked(pairs, path)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} isn't UTF-8: {error}") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None


def checked(pairs: Pairs, path: Path) -> Pairs:
    empty = [number for number, pair in enumerate(pairs, 1) if not all(text.strip() for text in pair)]
    if empty or not pairs:
        which = f"sample {empty[0]} ({len(empty)} in all)" if empty else "it"
        raise InputError(f"{path}: {which} is empty, and each needs a source and a target")
    return pairs


def phrases(split: str) -> Pairs:
    """Return phrases of Python's own manual, without and with their spaces. No phrase is in two splits.

    The manual is split by its topics, eight in ten of which are for training.
    """
    from pydoc_data.topics import topics

    parts: dict[str, dict[str, None]] = {"train": {}, "val": {}, "test": {}}
    for number, name in enumerate(sorted(topics)):
        text = " ".join(re.sub(r"[*`\\]", "", topics[name]).split())
        for sentence in re.findall(r"[A-Z][^.!?:]*[.!?:]", text):
            for phrase in textwrap.wrap(sentence, 24):
                if phrase.count(" ") > 1 and re.fullmatch(r"[A-Za-z ,;.:!?'()-]+", phrase):
                    parts[{0: "val", 5: "test"}.get(number % 10, "train")][phrase] = None
    known = {"train": [], "val": ["train"], "test": ["train", "val"]}[split]
    return [(text.replace(" ", ""), text) for text in parts[split] if not any(text in parts[part] for part in known)]


# Model


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "d_ff": 128, "d_kv": 32, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0},
    "small": {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6},
    "base": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24},
}
"""Of T5, as published, and one that a CPU trains in a minute."""


def load(asked: ModelArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a trained model and its tokenizer, or a T5 with random weights that reads bytes."""
    if asked.model_name_or_path is not None:
        try:
            # Weights that are saved in half precision are trained in full, under --fp16, too.
            model = AutoModelForSeq2SeqLM.from_pretrained(asked.model_name_or_path, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(asked.model_name_or_path)
        except (OSError, ValueError) as error:
            raise InputError(f"can't load --model_name_or_path {asked.model_name_or_path!r}: {error}") from error
        if hasattr(tokenizer, "src_lang"):
            raise InputError(
                f"{asked.model_name_or_path!r} is a model of many languages, which wants a token for each: this script "
                "trains models of one task, such as T5, BART, PEGASUS and Marian"
            )
    else:
        tokenizer = ByT5Tokenizer()
        special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **SIZES[asked.model_size], **special))
    if asked.freeze_embeds:
        freeze_embeddings(model)
    return model, tokenizer


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Leave embeddings and those of positions out of training; an output layer that shares them, too."""
    model.get_input_embeddings().requires_grad_(False)
    for side in (model.get_encoder(), model.get_decoder()):
        for name in ("embed_tokens", "embed_positions"):
            embeddings = getattr(side, name, None)
            if isinstance(embeddings, nn.Module):
                embeddings.requires_grad_(False)


def use_task(model: PreTrainedModel, task: str | None) -> str:
    """Have the model generate as its configuration says for a task, and return the prefix of its sources."""
    of_tasks = getattr(model.config, "task_specific_params", None) or {}
    settings = dict(of_tasks.get(task, {}))
    prefix = str(settings.pop("prefix", ""))
    model.generation_config.update(**settings)
    return prefix


def tokenized(
    pairs: Pairs, tokenizer: PreTrainedTokenizerBase, prefix: str, source: int, target: int | None
) -> list[dict[str, list[int]]]:
    """Return samples for the Trainer, cut to numbers of tokens."""
    sources = tokenizer([prefix + text for text, _ in pairs], max_length=source, truncation=True)
    labels = tokenizer(text_target=[text for _, text in pairs], max_length=target, truncation=True)
    rows = zip(sources["input_ids"], sources["attention_mask"], labels["input_ids"], strict=True)
    return [dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in rows]


# Metrics


def bleu(predictions: list[str], references: list[str]) -> float:
    """Return the BLEU of texts with one reference each, from 0 to 100: words and marks, one to four in a row.

    Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation" (2002), over the whole of the
    texts and without smoothing.
    """
    matched, proposed, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(predictions, references, strict=True):
        words = [re.findall(r"\w+|[^\w\s]", text) for text in pair]
        lengths = [total + len(text) for total, text in zip(lengths, words, strict=True)]
        for n in range(1, 5):
            ours, theirs = (Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in words)
            matched[n - 1] += (ours & theirs).total()
            proposed[n - 1] += ours.total()
    if min(matched) == 0:
        return 0.0
    precision = math.exp(sum(math.log(m / p) for m, p in zip(matched, proposed, strict=True)) / 4)
    return 100 * precision * min(1.0, math.exp(1 - lengths[1] / lengths[0]))


def decoded(predicted: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    tokens = np.where(predicted < 0, tokenizer.pad_token_id, predicted)
    return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def scorer(pairs: Pairs, tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return what computes metrics of the texts that were generated for pairs."""
    references = [target.strip() for _, target in pairs]

    def score(predicted: EvalPrediction) -> dict[str, float]:
        # So that each rank has as many, the library repeats samples at the end.
        tokens = predicted.predictions[: len(pairs)]
        texts = decoded(tokens, tokenizer)
        exact = [text == reference for text, reference in zip(texts, references, strict=True)]
        return {
            "bleu": bleu(texts, references),
            "exact_match": 100 * sum(exact) / len(exact),
            "gen_len": float(((tokens >= 0) & (tokens != tokenizer.pad_token_id)).sum(1).mean()),
        }

    return score


# Training


def mean_loss(smoothing: float) -> Callable[..., torch.Tensor]:
    """Return the cross-entropy as the mean over the tokens of all ranks and micro-batches of a step.

    The library hands over their number and relies on the division. T5 and others take the number and divide by that of
    their own micro-batch, so that the library's loss would be as many times too large as there are of these.
    """

    def compute(
        output: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        logits = output["logits"].flatten(0, 1).float()
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    return compute


class ByLength(Sampler[int]):
    """Draws samples of similar length together, so that little is padded: in another order in each epoch.

    The library's own draws from each rank's random numbers, which part when their models do.
    """

    def __init__(self, lengths: list[int], size: int, seed: int) -> None:
        self.lengths, self.size, self.seed, self.epoch = lengths, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(LengthGroupedSampler(self.size, lengths=self.lengths, generator=generator))


class Trainer(Seq2SeqTrainer):
    """The library's, over shardkit, with --sortish_sampler."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not self.args.sortish_sampler:
            return super()._get_train_sampler(train_dataset)
        lengths = [len(sample["input_ids"]) for sample in train_dataset or self.train_dataset]
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return ByLength(lengths, size, self.args.seed if self.args.data_seed is None else self.args.data_seed)


def on_every_rank(work: Callable[[], Result]) -> Result:
    """Return what a function returns; if it fails on one rank, fail on all of them before they wait for each other."""
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    told = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise InputError(f"rank {rank} failed with {text}")
    return result  # type: ignore[return-value]


def check(data: DataArguments, args: Arguments) -> None:
    """Refuse lengths that are none, and to train over what another training wrote, as the library did then."""
    for name in ("max_source_length", "max_target_length", "val_max_target_length", "test_max_target_length"):
        if getattr(data, name) < 2:
            raise InputError(f"--{name} is a number of tokens, at least 2, not {getattr(data, name)}")
    folder = Path(str(args.output_dir))
    goes_on = args.overwrite_output_dir or args.resume_from_checkpoint is not None
    if args.do_train and not goes_on and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"--output_dir {str(folder)!r} isn't empty: train into it with --overwrite_output_dir, go on from what it "
            "holds with --resume_from_checkpoint, or name another folder"
        )


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and predict as a command line says, and return all metrics."""
    asked, data, args = parse(words)
    set_seed(args.seed)  # the same weights on every rank

    asked_for = {"train": args.do_train, "val": args.do_eval, "test": args.do_predict}
    splits = [split for split, wanted in asked_for.items() if wanted]

    def prepare() -> Any:
        check(data, args)
        pairs = {split: read(data, split) for split in splits}
        return pairs, *load(asked)

    pairs, model, tokenizer = on_every_rank(prepare)
    prefix = use_task(model, data.task)
    prefix = prefix if data.source_prefix is None else data.source_prefix
    lengths = (data.max_target_length, data.val_max_target_length, data.test_max_target_length)
    limits = dict(zip(("train", "val", "test"), lengths, strict=True))
    sets = {
        split: tokenized(pairs[split], tokenizer, prefix, data.max_source_length, limits[split]) for split in splits
    }
    args.generation_max_length = args.generation_max_length or data.val_max_target_length

    trainer = Trainer(
        model,
        args,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=sets.get("train"),
        eval_dataset=sets.get("val"),
        processing_class=tokenizer,
        compute_loss_func=mean_loss(args.label_smoothing_factor),
        compute_metrics=scorer(pairs["val"], tokenizer) if "val" in pairs and args.predict_with_generate else None,
    )
    metrics: dict[str, float] = {}
    first = trainer.is_world_process_zero()
    if first:
        counts = ", ".join(f"{len(pairs[split]):,} to {split}" for split in splits)
        print(f"{counts}; {model.num_parameters():,} parameters; strategy {args.to_strategy() or 'of the library'}")

    if args.do_train:
        trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        metrics |= report(trainer, "train", trained.metrics)

    if args.do_eval:
        metrics |= report(trainer, "eval", trainer.evaluate())

    if args.do_predict:
        trainer.compute_metrics = scorer(pairs["test"], tokenizer) if args.predict_with_generate else None
        output = trainer.predict(sets["test"], max_length=data.test_max_target_length)
        metrics |= report(trainer, "test", output.metrics)
        if args.predict_with_generate and first:
            texts = decoded(output.predictions[: len(pairs["test"])], tokenizer)
            written = "".join(" ".join(text.splitlines()) + "\n" for text in texts)
            Path(args.output_dir, "test_generations.txt").write_text(written, encoding="utf-8")
            for (source, target), text in list(zip(pairs["test"], texts, strict=True))[:5]:
                print(f"\n    {source}\n  > {text}\n  = {target}")
    return metrics


def report(trainer: Trainer, split: str, metrics: dict[str, float]) -> dict[str, float]:
    """Show metrics, and write them to a file of their own and to all_results.json."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
    return metrics


if __name__ == "__main__":
    try:
        main()
    except ShardkitError as error:
        sys.exit(f"{type(error).__name__}: {error}")
