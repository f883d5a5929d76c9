"""The example examples/seq2seq.py: its arguments, data, metrics and errors, and the rows of its page on two ranks."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BartConfig, BartForConditionalGeneration, T5ForConditionalGeneration
from transformers.trainer_pt_utils import LabelSmoother

from examples import seq2seq
from shardkit import testing
from shardkit.errors import InputError
from tests.docs import _blocks
from tests.transformers import tiny

THEN = (
    "--model_name_or_path t5-large --output_dir output_dir --adam_eps 1e-06 --data_dir wmt_en_ro --do_eval --do_train "
    "--evaluation_strategy=steps --freeze_embeds --label_smoothing 0.1 --learning_rate 3e-5 --logging_first_step "
    "--logging_steps 1000 --max_source_length 128 --max_target_length 128 --num_train_epochs 1 --overwrite_output_dir "
    "--per_device_eval_batch_size 16 --per_device_train_batch_size 16 --predict_with_generate --eval_steps 25000 "
    "--sortish_sampler --task translation_en_to_ro --test_max_target_length 128 --val_max_target_length 128 "
    "--warmup_steps 500 --n_train 2000 --n_val 500"
)
"""The command line of January 2021, without the flags of its rows."""

TINY = (
    "--n_train 24 --n_val 7 --n_test 5 --max_steps 4 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 "
    "--gradient_accumulation_steps 2 --logging_steps 1 --freeze_embeds --max_target_length 12 "
    "--use_cpu --disable_tqdm true --save_strategy no --overwrite_output_dir"
)
"""A training of the default task that takes a second: three windows of 2 x 2 x 2 samples, and another one."""


def data_of(words: str) -> seq2seq.DataArguments:
    return seq2seq.parse([*words.split(), "--use_cpu"])[1]


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


# Arguments


OF_THEN = f"--deepspeed {_blocks.ROOT}/examples/ds_config_4.2.json --fp16"


@pytest.mark.parametrize("flags", ["", "--fp16", "--sharded_ddp", "--sharded_ddp --fp16", OF_THEN])
def test_the_command_line_of_then_means_what_it_meant(flags: str) -> None:
    model, data, args = seq2seq.parse([*THEN.split(), *flags.split(), "--use_cpu"])
    assert (model.model_name_or_path, model.freeze_embeds) == ("t5-large", True)
    assert (data.data_dir, data.task, data.n_train, data.n_val) == ("wmt_en_ro", "translation_en_to_ro", 2000, 500)
    assert {data.max_source_length, data.max_target_length, data.val_max_target_length} == {128}
    assert (args.adam_epsilon, args.label_smoothing_factor, args.learning_rate) == (1e-6, 0.1, 3e-5)
    assert (args.eval_strategy, args.eval_steps, args.warmup_steps) == ("steps", 25000, 500)
    assert args.sortish_sampler
    assert args.predict_with_generate
    assert args.overwrite_output_dir
    assert (args.do_train, args.do_eval, args.do_predict) == (True, True, False)
    assert args.fp16 == ("--fp16" in flags)
    assert bool(args.sharded_ddp) == ("--sharded_ddp" in flags)
    # A file of the form of 4.2.0 says what these arguments say, or would be refused.
    strategy = args.to_strategy()
    assert (strategy is not None and strategy.backend == "deepspeed") == ("--deepspeed" in flags)


def test_no_arguments_train_evaluate_and_predict() -> None:
    model, _, args = seq2seq.parse(["--use_cpu"])
    assert model.model_name_or_path is None
    assert args.do_train
    assert args.do_eval
    assert args.do_predict
    assert args.predict_with_generate
    assert args.learning_rate == 3e-3


def test_defaults_for_a_trained_model_are_the_librarys() -> None:
    _, _, args = seq2seq.parse(["--model_name_or_path", "t5-small", "--use_cpu"])
    assert (args.learning_rate, args.num_train_epochs, args.per_device_train_batch_size) == (5e-5, 3.0, 8)


def test_data_grouped_by_length_is_evaluated_in_its_own_order() -> None:
    args = seq2seq.parse(["--train_sampling_strategy", "group_by_length", "--use_cpu"])[2]
    assert args.sortish_sampler
    assert args.train_sampling_strategy == "random"


def test_help_lists_arguments_old_and_new(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        seq2seq.parse(["--help"])
    assert raised.value.code == 0
    told = capsys.readouterr().out
    for word in (*THEN.split(), "--sharded_ddp", "--deepspeed", "--strategy", *seq2seq.OLD_NAMES):
        assert not word.startswith("--") or word.partition("=")[0] in told, word


def test_an_unknown_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        seq2seq.parse(["--n_trian", "3"])
    assert raised.value.code == 2
    assert "unknown: --n_trian 3" in capsys.readouterr().err


# Data


def test_phrases_of_the_manual_are_in_one_split_each() -> None:
    splits = [seq2seq.phrases(split) for split in ("train", "val", "test")]
    assert all(len(pairs) > 100 for pairs in splits)
    targets = [target for pairs in splits for _, target in pairs]
    assert len(set(targets)) == len(targets)
    assert all(source == target.replace(" ", "") and len(target) <= 24 for pairs in splits for source, target in pairs)


def test_a_folder_of_lines_gives_pairs(tmp_path: Path) -> None:
    # A separator that Python's splitlines takes for a line's end isn't one.
    lines(tmp_path / "train.source", "one\u2028two", "three", "four")
    lines(tmp_path / "train.target", "un doi", "trei", "patru")
    assert seq2seq.read(data_of(f"--data_dir {tmp_path} --n_train 2"), "train") == [
        ("one\u2028two", "un doi"),
        ("three", "trei"),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"translation": {"ro": "unu", "en": "one"}}\n{"translation": {"ro": "doi, ", "en": "two"}}\n'),
        ("a.jsonl", '{"source": "one", "target": "unu"}\n{"source": "two", "target": "doi, "}\n'),
        ("a.csv", '\ufeffro,en\nunu,one\n"doi, ",two\n'),
        ("a.tsv", "source\tother\ttarget\r\none\t\tunu\r\ntwo\t\tdoi, \r\n"),
    ],
)
def test_a_file_gives_pairs_from_source_to_target(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = data_of(f"--validation_file {tmp_path / name} --task translation_en_to_ro")
    assert seq2seq.read(data, "val") == [("one", "unu"), ("two", "doi, ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data of which each is wrong."""
    lines(tmp_path / "train.source", "one", "two")
    lines(tmp_path / "train.target", "unu")
    lines(tmp_path / "val.source", "one", "", "three")
    lines(tmp_path / "val.target", "unu", "doi", " ")
    lines(tmp_path / "empty.csv", "source,target")
    lines(tmp_path / "rows.csv", "one,unu", "two,doi")
    lines(tmp_path / "short.csv", "source,target", "one")
    lines(tmp_path / "comma.csv", "source,target", "Well, yes,bine")
    lines(tmp_path / "texts.json", '{"translation": {"en": "one", "ro": "unu"}}')
    lines(tmp_path / "words.json", '{"source": "one", "target": "unu"}', '{"translation": "two"}')
    lines(tmp_path / "list.json", "[", '  {"source": "one", "target": "unu"}', "]")
    lines(tmp_path / "texts.bin", "one")
    (tmp_path / "latin.csv").write_bytes("source,target\none,ună\n".encode("latin2"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "split", "told"),
    [
        ("--data_dir nowhere", "train", "--data_dir 'nowhere' is no folder"),
        ("--data_dir {}", "test", "test.source can't be read: No such file"),
        ("--data_dir {}", "train", "train.source has 2 lines and .*train.target has 1"),
        ("--data_dir {}", "val", r"val.source: sample 2 \(2 in all\) is empty"),
        ("--train_file {}/empty.csv", "train", "empty.csv: it is empty"),
        (
            "--train_file {}/rows.csv",
            "train",
            r"sample 1 of .* has no texts 'source' and 'target', it has \['one', 'unu'",
        ),
        ("--train_file {}/short.csv", "train", "sample 1 of .* has no texts"),
        ("--train_file {}/comma.csv", "train", "sample 1 of .* has more columns than the first line names"),
        ("--train_file {}/texts.json", "train", r"it has \['en', 'ro'\]: --task translation_en_to_ro"),
        ("--train_file {}/words.json", "train", "sample 2 of .* has no texts"),
        ("--train_file {}/texts.json --task translation_en_to_de", "train", "no texts 'en' and 'de'"),
        ("--train_file {}/list.json", "train", "line 1 of .* isn't JSON, one object a line"),
        ("--train_file {}/none.json", "train", "none.json can't be read: No such file"),
        ("--train_file {}/texts.bin", "train", "ends with none of"),
        ("--train_file {}/latin.csv", "train", "latin.csv isn't UTF-8"),
        ("--train_file {}/texts.json", "val", "the val data is asked for, and there is no --validation_file"),
        ("--train_file texts.json --data_dir {}", "train", "--data_dir and files of data can't be used together"),
        ("--n_val 0", "val", "--n_val is a number of samples, or -1 for all of them, not 0"),
    ],
)
def test_data_that_is_wrong_is_refused(words: str, split: str, told: str, folder: Path) -> None:
    with pytest.raises(InputError, match=told):
        seq2seq.read(data_of(words.format(folder)), split)


@pytest.mark.parametrize("name", ["max_source_length", "val_max_target_length"])
def test_a_length_that_is_none_is_refused(name: str) -> None:
    _, data, args = seq2seq.parse([f"--{name}", "0", "--use_cpu"])
    with pytest.raises(InputError, match=f"--{name} is a number of tokens, at least 2, not 0"):
        seq2seq.check(data, args)


# Metrics


def test_bleu_is_that_of_its_definition() -> None:
    # Of one to four words in a row 5 of 6, 3 of 5, 2 of 4 and 1 of 3 are right.
    found = seq2seq.bleu(["the cat sat on the sofa"], ["the cat sat on a sofa"])
    assert found == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4))
    assert seq2seq.bleu(["a b c d", "e f g h"], ["a b c d", "e f g h"]) == pytest.approx(100)
    assert seq2seq.bleu(["a b c d"], ["a b c e"]) == 0


def test_bleu_counts_a_word_as_often_as_the_reference_has_it() -> None:
    # "the" twice of seven times: the example of the paper, made long enough for four in a row.
    found = seq2seq.bleu(["the the the the cat is on it"], ["the the cat is on it"])
    assert found == pytest.approx(100 * (6 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** (1 / 4))


def test_bleu_takes_off_what_is_too_short_over_all_texts_together() -> None:
    # All of 4 + 5 words are right, where the references have 5 + 6: exp(1 - 11 / 9).
    found = seq2seq.bleu(["a b c d", "e f g h i"], ["a b c d x", "e f g h i x"])
    assert found == pytest.approx(100 * math.exp(1 - 11 / 9))
    assert seq2seq.bleu(["a b c d e"], ["a b c d"]) == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))


def test_bleu_takes_marks_for_words() -> None:
    assert seq2seq.bleu(["Is it, then ?"], ["Is it, then?"]) == pytest.approx(100)


# Models


def test_embeddings_are_frozen_and_nothing_else() -> None:
    model, _ = seq2seq.load(seq2seq.ModelArguments(freeze_embeds=True))
    assert {name for name, value in model.named_parameters() if not value.requires_grad} == {"shared.weight"}
    config = BartConfig(vocab_size=8, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=4)
    bart = BartForConditionalGeneration(config)
    seq2seq.freeze_embeddings(bart)
    assert {name for name, value in bart.named_parameters() if not value.requires_grad} == {
        "model.shared.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    }


def test_a_task_has_its_prefix_and_its_way_to_generate() -> None:
    model, _ = seq2seq.load(seq2seq.ModelArguments())
    model.config.task_specific_params = {"translation_en_to_ro": {"prefix": "to Romanian: ", "num_beams": 4}}
    assert seq2seq.use_task(model, "summarization") == ""
    assert model.generation_config.num_beams in (None, 1)
    assert seq2seq.use_task(model, "translation_en_to_ro") == "to Romanian: "
    assert model.generation_config.num_beams == 4


def test_samples_are_cut_and_begin_with_the_prefix() -> None:
    _, tokenizer = seq2seq.load(seq2seq.ModelArguments())
    (sample,) = seq2seq.tokenized([("ab", "cdef")], tokenizer, ">", 128, 3)
    byte = 3  # of a byte's token, after those of padding, end and unknown
    assert sample["input_ids"] == [ord(">") + byte, ord("a") + byte, ord("b") + byte, 1]
    assert sample["labels"] == [ord("c") + byte, ord("d") + byte, 1]


# Training


def test_by_length_is_another_order_in_each_epoch_and_the_same_again() -> None:
    lengths = [number % 7 + 1 for number in range(100)]
    sampler = seq2seq.ByLength(lengths, 4, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    again = seq2seq.ByLength(lengths, 4, seed=3)
    again.set_epoch(1)
    assert list(again) == second
    # Batches of 4 are of like length, but at seams.
    spread = [
        max(lengths[i] for i in second[at : at + 4]) - min(lengths[i] for i in second[at : at + 4])
        for at in range(0, 100, 4)
    ]
    assert sum(spread) / len(spread) < 1.5


ROWS: dict[str, str] = {
    "baseline": "",
    "--sharded_ddp": "--sharded_ddp",
    "ZeRO-2": f"--deepspeed {_blocks.ROOT}/examples/ds_config_zero2.json",
    "ZeRO-2 with offload": f"--deepspeed {_blocks.ROOT}/examples/ds_config_zero2_offload.json",
    "smoothed": "--label_smoothing 0.1",
    "by length": "--sharded_ddp --sortish_sampler --save_strategy steps --save_steps 2",
}
LOSS = 1e-6
"""Relative, in float32: sums of two ranks in another order."""


@dataclass
class Ranks:
    """What one of two ranks saw."""

    metrics: dict[str, dict[str, float]]
    resumed: dict[str, float]
    """Of the row "by length", from its second step on, in the middle of an epoch."""
    refused: list[str]
    drawn: list[int]
    """Samples by their numbers, in three epochs."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "0").mkdir()
    for split in ("train", "val", "test"):
        lines(folder / "0" / f"{split}.source", "one", "two", "three")
        lines(folder / "0" / f"{split}.target", "unu", "doi", "trei")
    return folder


@pytest.fixture(scope="module")
def ranks(shared: Path) -> list[Ranks]:
    return testing.run(_rank, shared, processes=2, timeout=200)


def _rank(folder: Path) -> Ranks:
    rank = os.environ["RANK"]
    metrics = {
        name: seq2seq.main([*TINY.split(), *row.split(), "--output_dir", str(folder / name)])
        for name, row in ROWS.items()
    }
    again = [*TINY.split(), *ROWS["by length"].split(), "--output_dir", str(folder / "resumed")]
    resumed = seq2seq.main([*again, "--resume_from_checkpoint", str(folder / "by length" / "checkpoint-2")])
    refused = []
    for words in (
        f"--data_dir {folder / rank}",
        "--train_file nowhere.csv",
        f"--output_dir {folder / 'baseline'}",
    ):
        given = [word for word in TINY.split() if word != "--overwrite_output_dir"]
        with pytest.raises(InputError) as raised:
            seq2seq.main([*given, "--output_dir", str(folder / "refused"), *words.split()])
        refused.append(str(raised.value))
    with mock.patch.object(T5ForConditionalGeneration, "generate", _echo):
        seq2seq.main([*TINY.split(), *ECHO.split(), "--output_dir", str(folder / "echo")])
    return Ranks(metrics, resumed, refused, _drawn(folder))


ECHO = "--n_test 9 --do_predict --predict_with_generate --train_sampling_strategy group_by_length"


def _echo(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return input_ids


def _drawn(folder: Path) -> list[int]:
    """Train a model that draws random numbers of its own, other ones on each rank."""
    words = "--use_cpu --sharded_ddp --sortish_sampler --num_train_epochs 3 --per_device_train_batch_size 2"
    more = "--remove_unused_columns false --save_strategy no --disable_tqdm true --output_dir"
    drawn = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        drawn.extend(row["number"] for row in rows)
        ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
        return {"input_ids": ids, "labels": ids}

    samples = [{"number": number, "input_ids": list(range(2, 4 + number % 7))} for number in range(16)]
    args = seq2seq.parse([*words.split(), *more.split(), str(folder / "drawn")])[2]
    seq2seq.Trainer(tiny.t5(dropout=0.1), args, data_collator=collate, train_dataset=samples).train()
    return drawn


@pytest.mark.parametrize("row", ["--sharded_ddp", "ZeRO-2", "ZeRO-2 with offload"])
def test_a_row_has_the_losses_of_the_baseline(row: str, ranks: list[Ranks]) -> None:
    for name in ("train_loss", "eval_loss", "test_loss"):
        expected = ranks[0].metrics["baseline"][name]
        for rank in ranks:
            assert rank.metrics[row][name] == pytest.approx(expected, rel=LOSS), name


@pytest.mark.parametrize("row", ["baseline", "smoothed"])
def test_two_ranks_have_the_losses_of_one(row: str, ranks: list[Ranks], tmp_path: Path) -> None:
    words = [*TINY.split(), "--do_train", *ROWS[row].split(), "--output_dir", str(tmp_path)]
    one = seq2seq.main([*words, "--per_device_train_batch_size", "4"])
    assert ranks[0].metrics[row]["train_loss"] == pytest.approx(one["train_loss"], rel=LOSS)


def test_the_loss_is_the_librarys_over_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 3, 5, generator=generator), torch.tensor([[1, 2, -100], [4, -100, -100]])
    expected = LabelSmoother(0.1)({"logits": logits}, labels.clone())
    torch.testing.assert_close(seq2seq.mean_loss(0.1)({"logits": logits}, labels), expected)
    torch.testing.assert_close(seq2seq.mean_loss(0.1)({"logits": logits}, labels, 30), expected / 10)


def test_all_results_are_written(ranks: list[Ranks], shared: Path) -> None:
    for row in ROWS:
        folder = shared / row
        found = {name: json.loads((folder / f"{name}_results.json").read_text()) for name in ("train", "eval", "test")}
        assert found["train"] | found["eval"] | found["test"] == json.loads((folder / "all_results.json").read_text())
        for name in ("eval_loss", "eval_bleu", "eval_exact_match", "eval_gen_len", "test_loss", "test_bleu"):
            assert found[name.partition("_")[0]][name] == ranks[0].metrics[row][name]
        assert len((folder / "test_generations.txt").read_text().splitlines()) == 5


def test_a_trained_folder_is_loaded_again(ranks: list[Ranks], shared: Path, tmp_path: Path) -> None:
    words = f"--model_name_or_path {shared / '--sharded_ddp'} --do_predict --n_test 5 --use_cpu --disable_tqdm true"
    found = seq2seq.main([*words.split(), "--output_dir", str(tmp_path)])
    # One process takes the mean over five samples; two took it over six, the first one twice.
    assert found["test_loss"] == pytest.approx(ranks[0].metrics["--sharded_ddp"]["test_loss"], rel=0.05)
    assert "test_bleu" not in found


def test_what_is_wrong_on_one_rank_is_told_on_both(ranks: list[Ranks]) -> None:
    lacking, nowhere, full = zip(*(rank.refused for rank in ranks), strict=True)
    assert lacking[1].endswith("/1' is no folder")
    assert lacking[0] == f"rank 1 failed with InputError: {lacking[1]}"
    assert nowhere == ("nowhere.csv can't be read: No such file or directory",) * 2
    assert all("isn't empty: train into it with --overwrite_output_dir" in told for told in full)


def test_a_run_by_length_goes_on_in_its_order(ranks: list[Ranks]) -> None:
    for rank in ranks:
        assert rank.resumed["eval_loss"] == rank.metrics["by length"]["eval_loss"]


def test_predictions_are_in_the_order_of_the_test_data(ranks: list[Ranks], shared: Path) -> None:
    sources = [source for source, _ in seq2seq.phrases("test")[:9]]
    assert (shared / "echo" / "test_generations.txt").read_text().splitlines() == sources


def test_each_epoch_by_length_takes_each_sample_once(ranks: list[Ranks]) -> None:
    for epoch in range(3):
        drawn = [number for rank in ranks for number in rank.drawn[8 * epoch : 8 * epoch + 8]]
        assert sorted(drawn) == list(range(16))


# The page


def commands_of_page(mark: str) -> list[list[str]]:
    (block,) = [block for block in _blocks.blocks("docs/trainer-example.md") if mark in block.marks]
    return [shlex.split(line) for line in block.text.splitlines()]


def test_the_page_lists_the_six_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_blocks.ROOT)
    found = []
    for words in commands_of_page("rows"):
        assert words[:4] == ["torchrun", "--nproc_per_node", "2", "examples/seq2seq.py"]
        args = seq2seq.parse([*words[4:], "--use_cpu"])[2]
        strategy = args.to_strategy()
        zero = json.loads(Path(args.deepspeed).read_text())["zero_optimization"] if args.deepspeed else {}
        found.append((strategy and strategy.backend, args.fp16, zero.get("stage"), "offload_optimizer" in zero))
    assert found == [
        (None, False, None, False),
        (None, True, None, False),
        ("fairscale", False, None, False),
        ("fairscale", True, None, False),
        ("deepspeed", False, 2, False),
        ("deepspeed", False, 2, True),
    ]


def test_the_page_has_the_command_line_of_then() -> None:
    (then,), _ = commands_of_page("then")
    assert then == f"THEN={THEN.replace('--output_dir output_dir ', '')}"


@pytest.mark.slow
def test_the_six_rows_run_as_the_page_writes_them(tmp_path: Path) -> None:
    losses = []
    for number, words in enumerate(commands_of_page("rows")):
        folder = tmp_path / str(number)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words[1:],
            *TINY.split(),
            "--output_dir",
            str(folder),
        ]
        done = subprocess.run(command, cwd=_blocks.ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(json.loads((folder / "all_results.json").read_text())["train_loss"])
        assert len((folder / "test_generations.txt").read_text().splitlines()) == 5
    baseline, fp16, sharded, sharded16, zero2, offload = losses
    assert [sharded, zero2, offload] == pytest.approx([baseline] * 3, rel=LOSS)
    # In half precision only to its digits. On a CPU the library's own --fp16 does nothing.
    assert [fp16, sharded16] == pytest.approx([baseline] * 2, rel=1e-3)
    assert sharded16 != baseline
