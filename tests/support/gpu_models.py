"""Models on a GPU, and a GPU that has no free memory."""

from __future__ import annotations

from support import llama_logits
from support.llama_logits import PROMPT


def open_model(path, n_gpu_layers=-1, **kwargs):
    return llama_logits.open_model(path, n_gpu_layers=n_gpu_layers, **kwargs)


def greedy(llama, n=64, prompt=PROMPT):
    return llama_logits.greedy(llama, n, prompt)


FULL_GPU = """
import ctypes, sys
sys.path.insert(0, {tests!r})
from ggml_macko.native import devices
from support.gpu_models import greedy, open_model
devices.gpus()
ggml, base = ctypes.CDLL("libggml.so.0"), ctypes.CDLL("libggml-base.so.0")
for f in (ggml.ggml_backend_dev_by_name, base.ggml_backend_dev_buffer_type, base.ggml_backend_buft_alloc_buffer):
    f.restype = ctypes.c_void_p
ggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
base.ggml_backend_buft_alloc_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
base.ggml_backend_buffer_free.argtypes = [ctypes.c_void_p]
buft = base.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_name(b"MACKO0"))
held = []
def fill():
    for size in (1 << 30, 1 << 26, 1 << 21, 1 << 16): # until not even the smallest fits
        while buffer := base.ggml_backend_buft_alloc_buffer(buft, size):
            held.append(buffer)
def empty():
    while held:
        base.ggml_backend_buffer_free(held.pop())
"""

OUT_OF_MEMORY = (
    FULL_GPU
    + """
fill()
try:
    open_model({path!r}, verbose=True)
    print("loaded")
except (ValueError, MemoryError) as e:
    print("refused:", e)
empty()
print(greedy(open_model({path!r}), 16))
"""
)
