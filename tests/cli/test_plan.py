"""macko plan: predicted sizes and memory are those of convert, llama-quantize and llama.cpp, and predicted speeds are
measured ones.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

import ggml_macko
from ggml_macko import MackoError, console, system
from ggml_macko.benchmark import forms
from ggml_macko.codecs import coded
from ggml_macko.codecs.packed import TYPE_CODED
from ggml_macko.conversion import estimate, measured_speed, model_memory
from ggml_macko.conversion.inspect import parse_device
from ggml_macko.gguf.files import Model, make_key
from ggml_macko.native import codec, cpu
from ggml_macko.native.file import File
from ggml_macko.values import TYPE_BF16, TYPE_I8, TYPE_I32
from support import generators, gguf_bytes, tiny_models

MIB = 2**20


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """The bundled model without -0.0."""
    path = tmp_path_factory.mktemp("plan") / "pruned.gguf"
    with console.quiet():
        ggml_macko.prune(generators.DEMO, path, ggml_macko.PruneOptions(sparsity=0.5))
    return path


def by_type(found):
    return {t.type: t for t in found.types}


# ---- sizes ----


@pytest.mark.parametrize("type_name", ["macko", "packed", "sparse-lossless", "sparse-q8", "sparse-q5", "sparse-q4"])
def test_size_is_what_convert_writes(pruned, type_name):
    found = ggml_macko.plan(pruned, types=[type_name])
    done = ggml_macko.convert(pruned, None, type_name)
    (planned,) = (t for t in found.types if t.is_sparse)
    assert planned.type == type_name and found.sampled == 1
    assert planned.nbytes == sum(t.nbytes for t in done.tensors) and planned.n_sparse == done.n_sparse
    assert planned.nbytes < planned.nbytes_file == pytest.approx(done.nbytes, rel=0.01)


def test_sample_of_rows_gives_nearly_the_same(pruned, monkeypatch):
    exact = by_type(ggml_macko.plan(pruned))
    monkeypatch.setattr(estimate, "SAMPLE_WEIGHTS", 1 << 14)
    sampled = ggml_macko.plan(pruned)
    assert sampled.sampled < 0.3
    for name, t in by_type(sampled).items():
        assert t.nbytes == pytest.approx(exact[name].nbytes, rel=0.02), name
    whole = ggml_macko.plan(pruned, all_rows=True)
    assert whole.sampled == 1 and by_type(whole) == exact


def test_sample_of_a_sparse_file_is_that_of_the_dense_one(pruned, tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "SAMPLE_WEIGHTS", 1 << 14)
    with console.quiet():
        ggml_macko.convert(pruned, tmp_path / "sparse.gguf")
    dense, sparse = ggml_macko.plan(pruned), ggml_macko.plan(tmp_path / "sparse.gguf")
    assert [(g.density, g.nbytes_as) for g in dense.groups] == [(g.density, g.nbytes_as) for g in sparse.groups]


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M"])
def test_dense_types_have_the_size_of_llama_quantize(tmp_path, type_name):
    forms.quantize(generators.DEMO, tmp_path / "q.gguf", type_name, 2)
    with Model(tmp_path / "q.gguf") as model:
        expected = sum(t.nbytes for t in model.tensors)
    assert by_type(ggml_macko.plan(generators.DEMO, types=["packed"]))[type_name].nbytes == pytest.approx(
        expected, rel=1e-3
    )


def test_negative_zeros_count_as_zeros(tmp_path):
    w = np.ones((64, 256), np.float16)
    w[:, ::4], w[:, 1::4] = -0.0, 0
    path = generators.write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (w.view(np.uint16), 1)})
    found = ggml_macko.plan(path)
    assert found.n_negative_zeros == 64 * 64 and found.density == 0.5 and found.groups[0].density == 0.5
    assert f"{64 * 64} weights (25.0%) are -0.0" in found.advice[0]


def test_groups_add_up_to_the_model(pruned):
    found = ggml_macko.plan(pruned)
    with Model(pruned) as model:
        assert sum(g.n_tensors for g in found.groups) == len(model.tensors)
        assert sum(g.n_parameters for g in found.groups) == found.n_parameters
    assert {g.name for g in found.groups} >= {"token_embd", "attn_q", "ffn_down", "norms and biases"}
    for t in found.types:
        assert sum(g.nbytes_as[t.type] for g in found.groups) == t.nbytes


def test_break_even_is_where_sizes_are_equal(pruned):
    """Random masks with a lower density give a smaller file than the dense one, with a higher density a larger one."""
    found = ggml_macko.plan(pruned)
    blocks = [g for g in found.groups if g.value_bits is not None]
    n = sum(g.n_parameters for g in blocks)
    rng = np.random.default_rng(0)
    with Model(pruned) as model:
        cols = max((t for t in model.tensors if t.name.startswith("blk.")), key=lambda t: t.n_elements).cols
    for dense_type, name in (("Q8_0", "packed"), ("Q4_K_M", "sparse-q4")):
        other = sum(g.nbytes_as[name] for g in found.groups if g not in blocks)
        bits = (by_type(found)[dense_type].nbytes - other) * 8 / n
        for shift in (-0.02, 0.02):
            w = np.where(rng.random((1024, cols)) < by_type(found)[name].below[dense_type] + shift, 1, 0)
            m = ggml_macko.SparseMatrix.from_dense(w.astype(np.float16), format=name)
            assert (m.nbytes * 8 / w.size < bits) == (shift < 0), (dense_type, bits)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A small model like Gemma 3 270M: most weights are in an embedding of 640 columns, which is also the head."""
    rng = np.random.default_rng(0)
    blocks = [(f"blk.0.{name}.weight", rows) for name, rows in (("attn_q", 1024), ("ffn_up", 2048))]
    tensors = {name: (generators.random_bits(rng, rows, 640, 0.5), 1) for name, rows in blocks}
    tensors["token_embd.weight"] = (generators.safe_bits(rng, 8192, 640, 1.0, 1), 1)
    return generators.write_gguf(tmp_path_factory.mktemp("tied") / "m.gguf", tensors)


def test_large_tied_embedding_counts(tied):
    found = ggml_macko.plan(tied)
    types = by_type(found)
    assert [types[name].ends for name in ("packed", "sparse-q4", "Q4_K_M")] == ["f16", "q8_0", "q8_0"]
    assert types["sparse-q4"].nbytes_file < types["Q4_K_M"].nbytes_file < types["packed"].nbytes_file
    assert types["packed"].below["Q4_K_M"] == 0
    text = "\n".join(found.advice)
    assert "is smaller than dense Q4_K_M" in text and "a lossless file is smaller at no density" in text
    assert "token_embd.weight cannot become Q6_K or another K-quant: 640 columns are no multiple of 256" in text


def test_speed_counts_the_head(tied):
    """The blocks alone are 1.3 times as fast as in Q4_K_M, but the head takes most of the time."""
    machine = measured_speed.H200_QUANTIZED
    (speed,) = (t.speed[machine.name] for t in ggml_macko.plan(tied, types=["sparse-q4"]).types if t.is_sparse)
    block, head = machine.seconds(4.85) * 3072, machine.seconds(8.5) * 8192
    ratio = machine.ratio("sparse-q4", 0.5, "Q4_K_M")
    assert ratio > 1.3 and speed["Q4_K_M"] == pytest.approx((block + head) / (block / ratio + head), abs=0.01)
    assert 1 < speed["Q4_K_M"] < 1.1


# ---- memory ----


def test_cache_is_as_large_as_llama_cpp_makes_it(macko_process, pruned):
    """The estimate of the compute buffer is within a factor of two."""
    done = macko_process("generate", "-m", pruned, "-p", "x", "-n", 1, "-c", 512, "-t", 2, "-v")
    sizes = {kind: float(n) for kind, n in re.findall(r"(KV|compute) buffer size = +([\d.]+) MiB", done.err)}
    context = ggml_macko.plan(pruned, types=["packed"], n_ctx=500).context
    assert context.n_ctx == 512 and context.kv_cache / MIB == pytest.approx(sizes["KV"], abs=0.01)
    assert sizes["compute"] / 2 < context.compute / MIB < sizes["compute"] * 2, sizes


def test_memory_of_a_process_is_what_was_planned(pruned):
    command = ["generate", "-m", str(pruned), "-p", "The function returns a value. " * 30, "-n", "1", "-c", "512"]
    code = f"from ggml_macko import system\nfrom ggml_macko.commands import cli\ncli.main({command})\n"
    done = subprocess.run([sys.executable, "-c", code + "print(system.peak_rss())"], capture_output=True, text=True)
    found = ggml_macko.plan(pruned, types=["packed"], n_ctx=512)
    planned = pruned.stat().st_size + found.context.kv_cache + found.context.host
    assert int(done.stdout.splitlines()[-1]) == pytest.approx(planned, rel=0.25), done.stderr


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_every_architecture_has_a_memory_estimate(tmp_path, arch):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes.write(tiny_models.make(arch)))
    found = ggml_macko.plan(path, types=["packed"], n_ctx=256)
    n_kv, head, layers = tiny_models.N_KV, tiny_models.N_EMBD_HEAD, tiny_models.N_LAYER
    assert found.context.kv_cache == 256 * layers * n_kv * 2 * head * 2


def test_what_does_not_fit_the_gpu_is_left_out(pruned, monkeypatch):
    plain = by_type(ggml_macko.plan(pruned, types=["packed", "sparse-q4"], n_ctx=256))
    context = ggml_macko.plan(pruned, types=["packed"], n_ctx=256).context
    between = context.kv_cache + context.compute + context.gpu + plain["packed"].nbytes_gpu - 1
    monkeypatch.setattr(model_memory, "gpu_memory", lambda: [model_memory.DeviceMemory("GPU", between, between)])
    found = ggml_macko.plan(pruned, types=["packed", "sparse-q4"], n_ctx=256)
    (line,) = (line for line in found.advice if line.startswith("GPU has"))
    assert "packed" not in line and "sparse-q4" in line
    monkeypatch.setattr(model_memory, "gpu_memory", lambda: [model_memory.DeviceMemory("GPU", MIB, MIB)])
    assert "nothing fits" in " ".join(ggml_macko.plan(pruned, types=["packed"]).advice)


def test_embeddings_take_no_gpu_memory_beside_a_head_of_their_own(tmp_path):
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(512, 256)).astype(np.float16).view(np.uint16)
    block = np.where(rng.random((256, 256)) < 0.3, 1, 0).astype(np.float16).view(np.uint16)
    tensors = {"token_embd.weight": (weights, 1), "output.weight": (weights, 1), "blk.0.attn_q.weight": (block, 1)}
    for names, shared in ((list(tensors), False), (["token_embd.weight", "blk.0.attn_q.weight"], True)):
        path = generators.write_gguf(tmp_path / f"{len(names)}.gguf", {name: tensors[name] for name in names})
        found = by_type(ggml_macko.plan(path, types=["packed"]))["packed"]
        on_host = found.nbytes - found.nbytes_gpu
        assert on_host == pytest.approx(0 if shared else weights.nbytes, abs=block.nbytes), names


GPU_TYPES = ("macko", "packed", "sparse-lossless", "sparse-q8", "sparse-q4", "sparse-q5", "ec-csr")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A model whose matrices have different layouts on a GPU: wide and narrow, F16, BF16 and F32, three densities,
    experts, rows of equal length, and a matrix without zeros.
    """
    rng = np.random.default_rng(11)
    tensors = {}
    for i, (rows, cols, type_id, density) in enumerate(
        [(96, 4096, 30, 0.5), (192, 2048, 30, 0.3), (128, 2048, 1, 0.5), (160, 512, 1, 0.1), (64, 4096, 0, 0.4)]
    ):
        w = rng.normal(size=(rows, cols)).astype(np.float32)
        w[np.abs(w) < np.quantile(np.abs(w), 1 - density)] = 0
        bits = {0: w.view(np.uint32), 1: w.astype(np.float16).view(np.uint16)}.get(type_id)
        tensors[f"blk.{i}.attn_q.weight"] = (
            (w.view(np.uint32) >> 16).astype(np.uint16) if bits is None else bits,
            type_id,
        )
    w = rng.normal(size=(4, 32, 2048)).astype(np.float16)
    w[..., ::2] = 0
    tensors["blk.0.ffn_up_exps.weight"] = (w.view(np.uint16), 1)
    tensors["blk.0.ffn_down.weight"] = (rng.normal(size=(64, 256)).astype(np.float16).view(np.uint16), 1)
    return generators.write_gguf(tmp_path_factory.mktemp("shapes") / "shapes.gguf", tensors)


def reserved(path):
    """GPU memory of the tensors of a file; for sparse tensors, the library's reservation for their headers."""
    with File(path) as file:
        tensors, sparse = file.tensors(), file.sparse()
    total = sum(t.nbytes for t in tensors if t.sparse_index < 0)
    for s in sparse:
        parts = [tensors[i] for i in s.tensor_index]
        rows = int(np.prod(s.ne[1:]))
        total += codec.gpu_nbytes(
            codec.MatrixHeader(
                s.format,
                rows,
                s.ne[0],
                s.type,
                s.value_type,
                s.index_bits,
                s.nnz,
                tuple(t.type for t in parts),
                tuple(t.nbytes for t in parts),
            )  # fmt: skip
        )
    return total


@pytest.mark.parametrize("type_name", GPU_TYPES)
def test_gpu_memory_of_weights_is_what_the_library_reserves(shapes, tmp_path, type_name):
    found = by_type(ggml_macko.plan(shapes, types=[type_name]))[type_name]
    with console.quiet():
        done = ggml_macko.convert(shapes, tmp_path / "out.gguf", type_name)
    assert found.n_sparse == done.n_sparse > 0
    assert found.nbytes_gpu == pytest.approx(reserved(tmp_path / "out.gguf"), abs=32 * len(done.tensors))


@pytest.mark.parametrize("type_name", [name for name in GPU_TYPES if name != "ec-csr"])
def test_gpu_memory_from_a_sample_of_rows_is_nearly_the_same(shapes, monkeypatch, type_name):
    exact = by_type(ggml_macko.plan(shapes, types=[type_name]))[type_name]
    monkeypatch.setattr(estimate, "SAMPLE_WEIGHTS", 1 << 16)
    sampled = ggml_macko.plan(shapes, types=[type_name])
    assert sampled.sampled < 0.8
    assert by_type(sampled)[type_name].nbytes_gpu == pytest.approx(exact.nbytes_gpu, rel=0.02)


@pytest.mark.parametrize("type_name", ["macko", "sparse-lossless", "sparse-q4", "ec-csr"])
def test_inspect_shows_how_a_gpu_keeps_each_tensor(shapes, tmp_path, macko, type_name):
    with console.quiet():
        ggml_macko.convert(shapes, tmp_path / "out.gguf", type_name)
    report = json.loads(macko("inspect", "--json", "--device", "cuda:sm_86", tmp_path / "out.gguf").out)
    layouts = [t["layout"] for t in report["tensors"] if t["storage"] != "dense"]
    dense = sum(t["nbytes"] for t in report["tensors"] if t["storage"] == "dense")
    assert layouts and sum(layout["nbytes"] for layout in layouts) + dense == reserved(tmp_path / "out.gguf")
    assert all(layout["is_settled"] and layout["reason"] for layout in layouts)
    names = {layout["name"] for layout in layouts}
    assert names == {"FRAGMENTS"} if type_name == "sparse-q4" else {"EXP_CODED", "INLINE_DELTA"} <= names
    table = macko("inspect", "--device", "cuda:227KB", tmp_path / "out.gguf").out
    assert "bytes reserved" in table and all(layout["name"] in table for layout in layouts)


@pytest.mark.parametrize("type_name", ["macko", "sparse-lossless", "sparse-q4"])
def test_inspect_shows_how_the_cpu_keeps_each_tensor(shapes, tmp_path, macko, type_name):
    with console.quiet():
        ggml_macko.convert(shapes, tmp_path / "out.gguf", type_name)
    report = json.loads(macko("inspect", "--json", "--device", "cpu", tmp_path / "out.gguf").out)
    layouts = [t["layout"] for t in report["tensors"] if t["storage"] != "dense"]
    expected = {"QUANTIZED"} if type_name == "sparse-q4" else {"BITMAP", "CODED_BITMAP", "BUNDLES"}
    assert layouts and {layout["name"] for layout in layouts} <= expected
    for layout in layouts:
        assert layout["nbytes"] > 0 and layout["is_settled"] == (layout["name"] != "BUNDLES")
        assert layout["reason"].endswith(f"({cpu.cpu_kernels()})")


def test_headers_name_the_layouts_that_are_possible():
    header = coded_header(64, 4096, 64 * 2048, 10)
    layout = codec.gpu_layout(header)
    assert (layout.name, layout.delta_bits, layout.lanes, layout.bank_order) == ("EXP_CODED", 2, 16, True)
    assert not layout.is_settled and "MACKO" in layout.reason and layout.nbytes == codec.gpu_nbytes(header)


@pytest.mark.parametrize("device", ["cuda:sm_42", "cuda:9999", "gpu", "cuda:", "cpu:99KB"])
def test_unknown_device_is_refused(shapes, macko, device):
    done = macko("inspect", "--device", device, shapes)
    assert done.code == 1 and f"device '{device}': expected cpu, cuda, cuda:0, cuda:sm_75" in done.err


class FakeDriver:
    """The functions of libcuda for two GPUs, with 99 KB and 227 KB of shared memory for a block."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, out: object) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out: object, number: int) -> int:
        out._obj.value = number + 5  # a handle
        return 0

    def cuDeviceGetAttribute(self, out: object, attribute: int, device: object) -> int:
        out._obj.value = {5: 99, 6: 227}[device.value] << 10 if attribute == 97 else 0
        return 0


@pytest.mark.parametrize(
    ("device", "kb"), [("cuda", 99), ("cuda:0", 99), ("CUDA1", 227), ("MACKO1", 227), ("cuda:2", "2 GPUs")]
)
def test_present_gpu_is_asked_for_its_shared_memory(monkeypatch, device, kb):
    monkeypatch.setattr(system, "cuda_driver", FakeDriver)
    if isinstance(kb, int):
        assert parse_device(device) == kb << 10
    else:
        with pytest.raises(MackoError, match=f"device 'cuda:2': the driver finds {kb};"):
            parse_device(device)


def test_missing_gpu_is_one_clear_line(monkeypatch, shapes, macko):
    monkeypatch.setattr(system, "cuda_driver", lambda: None)
    done = macko("inspect", "--device", "cuda", shapes)
    assert done.code == 1 and "device 'cuda:0': the driver finds no GPU; cuda:sm_90 needs none" in done.err


def coded_header(rows, cols, nnz, n_outliers):
    """The header of a packed matrix of BF16 values in ten bits."""
    words = coded.n_words(coded.Coding(coded.Widths(7, 2, 0), n_outliers), TYPE_BF16, nnz)
    sizes = (4 * words, rows * cols // 8, 4 * (rows + 1))
    types = (TYPE_I32, TYPE_I8, TYPE_I32)
    return codec.MatrixHeader("packed", rows, cols, TYPE_BF16, TYPE_CODED, 0, nnz, types, sizes)


class EightBillion:
    """The parts of a Llama3-8B model with 32,000 tokens that a plan depends on."""

    layer = {
        "attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096),
        "ffn_gate": (14336, 4096), "ffn_up": (14336, 4096), "ffn_down": (4096, 14336),
    }  # fmt: skip
    n_layer = 32

    def __init__(self):
        names = {f"blk.{i}.{name}.weight": shape for i in range(self.n_layer) for name, shape in self.layer.items()}
        names.update({"token_embd.weight": (32000, 4096), "output.weight": (32000, 4096)})
        self.tensors = [
            SimpleNamespace(name=n, ne=(cols, rows), rows=rows, cols=cols) for n, (rows, cols) in names.items()
        ]
        self.keys = [make_key("general.architecture", "str", "llama")] + [
            make_key(f"llama.{name}", "u32", value)
            for name, value in {
                "block_count": self.n_layer,
                "embedding_length": 4096,
                "feed_forward_length": 14336,
                "attention.head_count": 32,
                "attention.head_count_kv": 8,
                "context_length": 8192,
            }.items()
        ]


def test_eight_billion_weights_take_what_was_measured():
    """H100, driver 580.159: BF16, half of the weights zero by magnitude, `sparse-lossless`, a file of 5,499.8 MiB.
    llama.cpp printed the buffers of the model and the cache; nvidia-smi printed the total.
    """
    model = EightBillion()
    headers = [coded_header(r, c, r * c // 2, r * c // 20000) for r, c in model.layer.values()]
    dense = 32000 * 4096 * 2
    stored = model.n_layer * sum(sum(h.nbytes) for h in headers) + 2 * dense
    assert stored / MIB == pytest.approx(5499.8, rel=1e-3)
    weights = model.n_layer * sum(codec.gpu_nbytes(h) for h in headers) + dense
    assert weights / MIB == pytest.approx(5980.4, rel=1e-3)
    context = model_memory.context_memory(model, 4096)
    assert context.kv_cache == 512 * MIB
    used = weights + context.kv_cache + context.compute + context.gpu
    assert used / MIB == pytest.approx(7489, rel=0.03)


@pytest.mark.parametrize("shared_nbytes", [64 << 10, 99 << 10, 227 << 10])
def test_rows_that_do_not_fit_shared_memory_take_more(shared_nbytes):
    """Values of ten bits keep their coding only if x, with 25 % more space, fits."""
    for cols in (4096, 28672):
        header = coded_header(64, cols, 32 * cols, 0)
        growth = codec.gpu_nbytes(header, shared_nbytes) / sum(header.nbytes)
        assert (growth < 1.25) == (1.25 * cols + 1024 < shared_nbytes / 4), (cols, growth)


def test_buffers_for_prompts_are_as_large_as_the_plugin_makes_them():
    ops = (generators.ROOT / "ggml-macko/src/cuda/ops/ops.h").read_text()
    most, share = re.search(r"MOST = size_t\((\d+)\) << 20, SHARE = (\d+);", ops).groups()
    assert (int(most) * MIB, int(share)) == (model_memory.MAX_PANEL_NBYTES, model_memory.PANEL_SHARE)
    cublas = (generators.ROOT / "ggml-macko/src/cuda/lib/cublas.h").read_text()
    (workspace,) = re.search(r"CUBLAS_WORKSPACE_NBYTES = size_t\((\d+)\) << 20;", cublas).groups()
    assert int(workspace) * MIB == model_memory.CUBLAS_WORKSPACE_NBYTES


def test_header_that_no_file_may_have_is_refused():
    good = coded_header(64, 4096, 64 * 2048, 0)
    for change in (
        {"format": "csr"},
        {"rows": -1},
        {"nnz": 64 * 4096 + 1},
        {"types": good.types[:2], "nbytes": good.nbytes[:2]},
        {"types": (TYPE_I8, *good.types[1:])},
        {"nbytes": (-4, *good.nbytes[1:])},
        {"nbytes": (1 << 60, *good.nbytes[1:])},
        {"value_type": TYPE_BF16},
    ):
        with pytest.raises(ggml_macko.MackoError):
            codec.gpu_nbytes(dataclasses.replace(good, **change))


# ---- advice ----


def test_dense_model_is_told_to_use_llama_quantize(tmp_path, macko):
    w = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float16)
    path = generators.write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (w.view(np.uint16), 1)})
    done = macko("plan", path)
    assert done.code == 0 and "Not pruned: 100.0% of its weights are not zero" in done.out
    assert "llama-quantize: Q8_0" in done.out


def test_quantized_model_is_told_why_not(tmp_path, macko):
    q8 = gguf.quants.quantize(np.ones((8, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = generators.write_gguf(tmp_path / "q.gguf", {"blk.0.attn_q.weight": (q8, 8)})
    done = macko("plan", path)
    assert done.code == 0 and "quantized already: only F16, BF16 and F32" in done.out
    assert "`macko prune` dequantizes" in done.out


def test_advice_of_a_pruned_model(pruned, macko):
    done = macko("plan", pruned)
    assert done.code == 0 and "Smallest lossless type: sparse-lossless" in done.out
    assert "dense Q4_K_M is smaller" in done.out and "measured on NVIDIA H200" in done.out


def test_json_holds_everything(pruned, macko):
    found = json.loads(macko("plan", pruned, "--json", "-c", 256, "--types", "packed,sparse-q8").out)
    assert [t["type"] for t in found["types"]] == ["packed", "sparse-q8", "Q8_0", "Q4_K_M"]
    assert found["context"]["n_ctx"] == 256 and found["advice"] and found["groups"][0]["nbytes_as"]["packed"] > 0


def test_unknown_type_is_one_line(pruned, macko):
    done = macko("plan", pruned, "--types", "csr")
    assert done.code in (1, 2) and "unknown type 'csr'" in done.err and done.err.count("\n") == 1


def test_inspect_shows_the_break_even(pruned, macko):
    found = {t["name"]: t for t in json.loads(macko("inspect", pruned, "--json").out)["tensors"]}
    planned = {t.name: t for t in ggml_macko.convert(pruned, None, "macko").tensors}
    for name, t in found.items():
        if planned[name].is_sparse:
            assert 0.8 < t["break_even_density"] < 1
        elif len(t["shape"]) < 2:
            assert t["break_even_density"] is None
    assert "break-even density" in macko("inspect", pruned).out


# ---- measured speeds ----


def test_speeds_are_those_of_the_page():
    """measured_speed.py repeats tables of docs/guide/performance.md; the page must contain each of its numbers."""
    page = (generators.ROOT / measured_speed.PAGE).read_text()
    rows = {
        cells[0].strip(): [c.strip() for c in cells[1:]]
        for cells in (line.strip("|\n").split("|") for line in page.splitlines() if line.startswith("|"))
    }
    generation = {k: [c.split(" (")[0] for c in v] for k, v in rows.items()}
    for column, machine in enumerate((measured_speed.AVX512_VBMI2, measured_speed.AVX2)):
        for name, speed in machine.dense.items():
            assert first_row(page, f"dense {name}")[column] == f"{speed:.1f}", (machine.name, name)
    for density, label in ((0.5, "sparse F16, 50 % zeros"), (0.3, "sparse F16, 70 %"), (0.1, "sparse F16, 90 %")):
        cells = first_row(page, label)
        for column, machine in enumerate((measured_speed.AVX512_VBMI2, measured_speed.AVX2)):
            speed = machine.sparse[measured_speed.SPARSE_F16].get(density)
            assert cells[column] == ("not measured" if speed is None else f"{speed:.1f}")
    for label, beside, machine in (
        ("AVX-512 VBMI2", "native", measured_speed.AVX512_VBMI2_4_BITS),
        ("AVX2 with AVX-VNNI", "beside AVX2 with AVX-VNNI", measured_speed.AVX2_VNNI_4_BITS),
        ("AVX2", "beside AVX2", measured_speed.AVX2_4_BITS),
    ):
        for stored, speeds in machine.sparse.items():
            assert first_row(page, f"{stored}, {label}")[-1] == f"{speeds[0.5]:.1f}"
        for name, speed in machine.dense.items():
            assert first_row(page, f"dense {name}, {beside}")[-1] == f"{speed:.1f}", name
    amd = (measured_speed.AVX512_VBMI2_4_BITS_AMD, measured_speed.AVX2_4_BITS_AMD)
    vbmi2, avx2 = ((m.dense[measured_speed.Q4_K_M], m.sparse[measured_speed.SPARSE_Q4][0.5]) for m in amd)
    assert (
        f"generates {vbmi2[0]:.1f} tokens/s with Q4_K_M and {vbmi2[1]:.1f} with `sparse-q4`; "
        f"with AVX2, {avx2[0]:.1f} and {avx2[1]:.1f}."
    ) in page
    quantized = measured_speed.H200_QUANTIZED
    for label, speed in (("llama.cpp F16", quantized.dense["F16"]), ("llama.cpp Q4_K_M", quantized.dense["Q4_K_M"])):
        assert first_row(page, label)[1].startswith(f"{speed:g} /")
    for stored, speeds in quantized.sparse.items():
        for density, speed in speeds.items():
            assert first_row(page, f"{stored}, {100 - 100 * density:.0f} % zeros")[1].startswith(f"{speed:g} /")
    h200, text = measured_speed.H200, " ".join(page.split())
    assert f"Dense F16 on the same device: {h200.dense['F16']:g} tok/s" in text
    assert f"Q8_0 {h200.dense['Q8_0']:g}, Q4_K_M {h200.dense['Q4_K_M']:g}" in text
    numbers = [re.match(r"\d+", c)[0] for c in generation["sparse F16, from Python"]]
    assert numbers == [f"{s:g}" for s in h200.sparse["sparse F16"].values()]


def first_row(page: str, label: str) -> list[str]:
    """The cells of the first row with this label, without their ratios."""
    (line, *_) = (line for line in page.splitlines() if line.startswith(f"| {label} |"))
    return [c.strip().split(" (")[0] for c in line.strip("|").split("|")[1:]]


def test_speeds_between_measurements_are_interpolated():
    machine = measured_speed.AVX512_VBMI2
    assert machine.ratio("sparse F16", 0.5, "F16") == pytest.approx(28.1 / 17.2)
    assert 28.1 / 17.2 < machine.ratio("sparse F16", 0.4, "F16") < 37.3 / 17.2
    assert machine.ratio("sparse F16", 0.8, "F16") is None and machine.ratio("sparse-q8", 0.3, "F16") is None
    limit = machine.break_even("sparse F16", "Q4_K_M")
    assert machine.ratio("sparse F16", limit, "Q4_K_M") == pytest.approx(1) and 0.1 < limit < 0.3
