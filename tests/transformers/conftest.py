"""Ranks of these tests come from a server that has imported the Trainer."""

from shardkit import testing

testing.preload("tests.transformers.tiny")
