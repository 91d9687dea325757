"""A way back for pruned models: training the weights that are left, with the dense model as the teacher (PyTorch).

`recover.py` is the entry; `options.py` what it is asked to do; `transformer.py` the forward pass of llama-family
models; `masked_adam.py` an optimizer that leaves zeros alone; `quantized_weights.py` the values that the model sees of
weights where they are to be quantized; `distillation.py` and `blockwise.py` the two methods; `schedule.py` what a step
reads; `checkpoint.py` the file from which a run that was interrupted goes on. The forward pass, the optimizer and the
methods import PyTorch; the others do not.
"""
