"""Every strategy against one process: the same losses, norms, gradients and weights.

A *cell* is one short training run: a model, an optimizer, an accumulation and a clipping, under one strategy at one
world size. All cells of a strategy and a world size run in one launch, which records a trace of each; many small tests
compare the traces with a reference that plain torch computes in one process from the whole global batch.
"""
