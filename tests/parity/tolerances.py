"""How far a strategy may be from the reference, in one place.

Both compute in float32, each with its own order of sums, so the bound is round-off: twice the distance of plain torch
in float32 from float64, and a margin for other processors and libraries. The largest distances over all models,
optimizers, clippings, ways to split the batch and three steps, relative to a tensor's largest element, as
``python -m tests.parity.roundoff`` prints them (2026-11, torch 2.13.0+cpu, transformers 5.24.0, x86_64):

    model           loss      norm  gradient    weight
    mlp          9.8e-08   9.8e-08   3.8e-07   5.1e-07
    convnet      1.2e-07   1.6e-07   1.3e-06   1.5e-06
    t5_tiny      9.3e-08   1.4e-07   1.4e-06   1.0e-06
    gpt2_tiny    1.6e-07   1.0e-07   1.5e-06   4.6e-06

The weights of GPT-2 stand out for its biases, which start at zero: relative to their whole value, three steps of Adam
carry the round-off of three gradients. ``test_tolerances.py`` measures again and holds the bounds to it: each is at
least twice and at most ten times the largest distance.
"""

LOSS = 1e-6
GRAD_NORM = 1e-6
GRADIENT = 5e-6
WEIGHT = 1e-5

LOW_PRECISION_FACTOR = 2.0
"""How many times as far from float64 as plain DDP a strategy may be in bf16 and fp16, on the same work.

All run the same forward in the same format, so that most are at 1 but for the order of float32 sums. What may differ is
where a weight is used several times in a forward: its gradients add up in the low format, or in float32 where stage 3
casts it again for each use.
"""

HALF_WEIGHTS_OVER_AUTOCAST = 2.0
"""How far from float64 weights in bf16 with float32 masters may be, in multiples of plain torch's distance in autocast.

Both round the same numbers to bf16; weights in bf16 also round those of embeddings and norms, and the gradients of
weights that are used twice as they are added. Over ten steps of AdamW, summed over seeds since a single run's distance
is chance, the multiples were at most 1.43 for losses and 1.1 for weights, of four models and four seeds (2026-11, torch
2.13.0+cpu).
"""
