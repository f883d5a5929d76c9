"""The Trainer of the transformers library with ``--sharded_ddp``, ``--deepspeed`` and ``--strategy``.

Drop-in replacements: without one of the three flags they are the library's own classes. With one, the model trains in a
:class:`shardkit.Session`, which stands where the Trainer's accelerator was. ``pip install "shardkit[transformers]"``.
"""

from shardkit.transformers import _library as _library  # first: it says what is missing
from shardkit.transformers._arguments import Seq2SeqTrainingArguments, TrainingArguments
from shardkit.transformers._sharded_ddp import ShardedDDPOption
from shardkit.transformers._trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "ShardedDDPOption", "Trainer", "TrainingArguments"]
