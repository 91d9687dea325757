"""Recovery of pruned models: trains the remaining weights, with the dense model as the teacher (PyTorch).

`recover.py` has the public function, `options.py` its options, `masked_adam.py` an optimizer that keeps zeros,
`quantized_weights.py` and `dense_weights.py` the quantized values of weights during training (sparse and dense types),
`distillation.py` and `blockwise.py` the two methods, `divergence.py` the loss, `sampling.py` text that the dense model
writes, `ranks.py` the processes of torchrun, `schedule.py` the tokens of a step, and `checkpoint.py` the file from
which an interrupted run resumes. The forward pass is in `evaluation/transformer.py`. `recover.py`, `options.py`,
`schedule.py` and `checkpoint.py` do not import PyTorch.
"""
