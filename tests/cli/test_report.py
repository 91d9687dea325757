"""macko report has a row for each requested form, the figures of the other tools, and no temporary files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_macko.benchmark import forms, page, plot, report
from ggml_macko.evaluation import likelihood, perplexity
from ggml_macko.evaluation.text_model import TextModel
from ggml_macko.native import devices
from support import generators, gguf_bytes, tiny_models

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, model, text): a random model and a text."""
    folder = tmp_path_factory.mktemp("report")
    model = folder / "model.gguf"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    text = folder / "text.txt"
    text.write_text("".join(np.random.default_rng(1).choice(list("ab ab\n"), 3000)))
    return folder, model, text


def run(macko, made, *args):
    _, model, text = made
    common = ["-f", text, "-c", 32, "-p", 8, "-n", 4, "-r", 1, "-t", 2]
    return macko("report", model, *args, *common)


def test_each_conversion_gives_a_row(made, macko, tmp_path):
    """Each --convert is applied to the given file; kinds tell which results are quantized."""
    _, model, _ = made
    pruned = tmp_path / "pruned.gguf"
    assert macko("prune", model, pruned, "--sparsity", "0.6").code == 0
    conversions = ("macko", "sparse-q8 --token-embedding-type q8_0", "sparse-q4", "auto --target-bpw 5")
    done = run(macko, made, pruned, "--types", "", "--json", *(x for c in conversions for x in ("--convert", c)))
    assert done.code == 0, done.err
    results = json.loads(done.out)["models"]
    names = ["model", "pruned macko", "pruned sparse-q8", "pruned sparse-q4", "pruned auto 5 bpw"]
    assert [r["model"] for r in results] == names
    kinds = ["dense", "sparse", "sparse quantized", "sparse quantized", "sparse quantized"]
    assert [r["kind"] for r in results] == kinds
    assert results[4]["bpw"] <= 8 and results[2]["nbytes"] < results[1]["nbytes"]
    for bad in ("macko --dry-run", "macko --no-such-option", "sparse-q9_0"):
        done = run(macko, made, pruned, "--types", "", "--convert", bad)
        assert done.code == 2 and done.err.strip().count("\n") == 0, done.err


def test_figures_are_those_of_the_other_tools(made, macko, tmp_path):
    pytest.importorskip("matplotlib")
    folder, model, text = made
    pruned = tmp_path / "pruned.gguf"
    assert macko("prune", model, pruned, "--sparsity", "0.9").code == 0
    before = {p.name for p in folder.iterdir()}
    stem = tmp_path / "plot"
    done = run(
        macko,
        made,
        pruned,
        "--types",
        "Q8_0,Q4_0",
        "--prune",
        "--sparsity 0.8 --compare-within tensor",
        "--json",
        "-o",
        stem,
        "--prompt",
        "ab <b>",
    )
    assert done.code == 0, done.err
    results = {r["model"]: r for r in json.loads(done.out)["models"]}
    assert [r["kind"] for r in results.values()] == ["dense", "quantized", "quantized", "sparse", "sparse"]
    assert list(results) == ["model", "Q8_0", "Q4_0", "magnitude 80% per tensor", "pruned"]
    for name, path in (("model", model), ("pruned", pruned)):
        want = perplexity.perplexity(path, text, n_ctx=32, n_threads=2, n_gpu_layers=0)
        assert results[name]["ppl"] == pytest.approx(want.ppl, rel=1e-4), name
        assert results[name]["tokens"] == want.n_tokens
    assert results["model"]["nbytes"] == model.stat().st_size
    n_parameters = sum(int(t.n_elements) for t in gguf.GGUFReader(model).tensors)
    for r in results.values():
        assert r["bpw"] == r["nbytes"] * 8 / n_parameters
        assert r["gen_tps"] > 0 and len(r["samples"]) == 1
    assert results["Q4_0"]["nbytes"] < results["Q8_0"]["nbytes"] < results["model"]["nbytes"]
    assert results["pruned"]["nbytes"] < results["magnitude 80% per tensor"]["nbytes"] < results["model"]["nbytes"]
    assert results["Q4_0"]["ppl"] != results["model"]["ppl"] != results["pruned"]["ppl"]
    assert {p.name for p in tmp_path.iterdir()} == {"pruned.gguf", "plot.png", "plot.svg", "plot.html"}
    assert {p.name for p in folder.iterdir()} == before
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    svg = (tmp_path / "plot.svg").read_text()
    assert svg.startswith("<?xml") and all(f">{name}<" in svg for name in results)
    shown = (tmp_path / "plot.html").read_text()
    for name, r in results.items():
        (row,) = re.findall(rf"<tr><td>{name}<.*", shown)
        assert f'data-value="{r["ppl"]!r}"' in row and f'data-value="{r["gen_tps"]!r}"' in row
        assert f">{name}: {r['bpw']:.4g} bits per weight, whole file, perplexity {r['ppl']:.2f}<" in shown
        assert f"<h3>{name}</h3><p><span class=prompt>ab &lt;b&gt;</span>" in shown
    assert "<b>" not in shown and "://" not in shown and "default-src 'none'" in shown


def test_kl_divergence_and_top_tokens_are_those_of_macko_perplexity(made, macko, tmp_path):
    """Also of a quantized file, which is a row as it is."""
    _, model, text = made
    quantized, base = tmp_path / "q4.gguf", tmp_path / "base.kld"
    forms.quantize(model, quantized, "Q4_0", 2)
    done = run(macko, made, quantized, "--types", "", "--kl-divergence", "--json")
    assert done.code == 0, done.err
    dense, found = json.loads(done.out)["models"]
    assert (dense["kld"], dense["same_top"]) == (0, 1) and (found["model"], found["kind"]) == ("q4", "quantized")
    perplexity.perplexity(model, text, n_ctx=32, n_gpu_layers=0, kl_divergence_base=base)
    want = perplexity.kl_divergence(quantized, base, n_gpu_layers=0)
    assert found["kld"] == pytest.approx(want.kld.value, rel=1e-3) and found["same_top"] == want.same_top.value
    assert found["ppl"] == pytest.approx(want.ppl.value, rel=1e-4) and found["nbytes"] == quantized.stat().st_size
    done = run(macko, made, quantized, "--types", "", "--kl-divergence")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in done.out.splitlines() if line.startswith("|")]
    assert rows[0][6:8] == ["KL divergence", "same top"]
    assert rows[3][6:8] == [f"{found['kld']:.4f} nats", f"{found['same_top']:.1%}"]


def test_bench_without_a_gpu_has_no_gpu_memory(made, macko):
    """The default of -ngl is all, also on machines without a GPU."""
    if devices.gpus():
        pytest.skip("there is a GPU")
    _, model, _ = made
    done = macko("bench", "-m", model, "--dense", model, "-p", 8, "-n", 4, "-r", 1, "-t", 2)
    assert done.code == 0 and "GPU memory" not in done.out, done.err


def test_dense_model_is_the_base_of_the_table(made, macko):
    done = run(macko, made, "--types", "Q8_0")
    assert done.code == 0, done.err
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in done.out.splitlines() if line.startswith("|")]
    assert rows[0][:5] == ["model", "kind", "MiB", "BPW", "perplexity"] and [r[0] for r in rows[2:]] == [
        "model",
        "Q8_0",
    ]
    assert rows[2][2].endswith("(1.00x)") and rows[2][5] == "+0.0%"
    assert "2 threads, medians of 1 interleaved runs" in done.out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--types", "Q9_9"], "--types: llama.cpp has no type Q9_9"),
        (["--types", "", "--prune", "--sparsity 2"], "--sparsity 2: expected"),
        (["--types", "", "--prune", "--sparsity 0.5 --nonsense"], "--nonsense is not allowed here"),
        (["--types", "", "--prune", "--method magic"], "--prune --method magic: "),
        (["--types", "", "--prune", "'"], "--prune ': "),
        (["--types", "", "-r", "0"], "'0' is not an integer from 1 to"),
    ],
)
def test_bad_options_are_refused_in_one_line(made, macko, args, message):
    _, model, text = made
    done = macko("report", model, "-f", text, *args)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1


def test_file_of_another_model_is_refused(made, macko, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_bytes.write(tiny_models.make("qwen3")))
    done = run(macko, made, other, "--types", "")
    assert done.code == 1 and "other.gguf: has other tensors than" in done.err


def test_two_rows_of_one_name_are_refused(made, macko):
    _, model, _ = made
    done = run(macko, made, model, "--types", "")
    assert done.code == 1 and "two models would be called 'model'" in done.err


def test_missing_matplotlib_is_refused_before_measuring(made, macko, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "Forms", None)
    done = run(macko, made, "-o", tmp_path / "plot")
    assert done.code == 1 and "pip install 'ggml-macko[plot]'" in done.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plot.svg", "plot.html"])
def test_existing_plot_is_kept_without_force(made, macko, tmp_path, name):
    pytest.importorskip("matplotlib")
    (tmp_path / name).write_text("mine")
    done = run(macko, made, "-o", tmp_path / "plot", "--types", "")
    assert done.code == 1 and "exists; use --force" in done.err
    assert [p.name for p in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (15, 17.9, [15, 15.5, 16, 16.5, 17, 17.5]),
        (18, 120, [20, 30, 50, 70, 100]),
        (1, 200, [1, 2, 5, 10, 20, 50, 100, 200]),
    ],
)
def test_axes_have_round_numbers(low, high, ticks):
    assert page._ticks(low, high) == pytest.approx(ticks)


def test_page_escapes_names_and_texts():
    """The page also escapes control characters, except for line ends and tabs of a text."""
    name, text = "<i>\x1b", "a\n\t<script>\x07"
    shown = page.page(
        name, name, [page.Column(name), page.Column("x", ".1f")], [(name, None), (name, 2.0)],
        [plot.Panel(name, [plot.Point(name, "dense", 1, 2), plot.Point(name, "sparse", 3000, 4)])],
        [page.Continuation(name, [(name, text)])],
    )  # fmt: skip
    body = shown.split("</style>")[1].split("<script>")[0]
    assert "<i>" not in shown and "\x1b" not in shown and "a\n\t&lt;script&gt;\\x07" in body
    assert "<td>\n" in body and ">2.0" in body and body.count('"point ') == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_browser_shows_the_page_in_light_and_dark_sorts_it_and_loads_nothing(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="no matplotlib, which reads the screenshots")
    columns, rows = [page.Column("model"), page.Column("x", ".1f")], [("b", 2.0), ("a", 3.0), ("c", None), ("d", 1.0)]
    panel = plot.Panel("size", [plot.Point("b", "dense", 1, 2), plot.Point("a", "sparse", 30, 4)])
    shown = page.page("title", "about", columns, rows, [panel], [page.Continuation("Once", [("a", " more")])])
    (tmp_path / "page.html").write_text(shown)
    click = "<script>document.querySelectorAll('th button')[1].click()</script>"
    (tmp_path / "sorted.html").write_text(shown + click)
    runs = {}
    for name, scheme, file, what in (
        ("light", 1, "page", f"--screenshot={tmp_path / 'light.png'}"),
        ("dark", 0, "page", f"--screenshot={tmp_path / 'dark.png'}"),
        ("sorted", 1, "sorted", "--dump-dom"),
    ):
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,700",
            f"--user-data-dir={tmp_path / name}", f"--blink-settings=preferredColorScheme={scheme}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", what, f"file://{tmp_path / file}.html",
        ]  # fmt: skip
        runs[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = {name: process.communicate(timeout=120) for name, process in runs.items()}
    assert all(process.returncode == 0 for process in runs.values()), done
    assert not [
        line for _, err in done.values() for line in err.splitlines() if "CONSOLE" in line
    ]  # errors, blocked loads
    assert re.findall("<td>([abcd])</td>", done["sorted"][0]) == ["d", "b", "a", "c"]
    pictures = {name: np.rint(255 * image.imread(tmp_path / f"{name}.png")[..., :3]) for name in ("light", "dark")}
    corners = [picture[0, 0].tolist() for picture in pictures.values()]
    assert corners == [[0xFF, 0xFF, 0xFF], [0x15, 0x18, 0x1C]]
    sparse = [[0x1B, 0x6A, 0xC9], [0x6C, 0xB0, 0xFF]]  # the colors of markers
    assert all((picture == color).all(-1).any() for picture, color in zip(pictures.values(), sparse))


def test_chunks_are_spread_over_the_text(made):
    _, model, text = made
    with TextModel(model, n_ctx=32, n_threads=2) as llama:
        chunks = llama.read_chunks(text)
        picked = [
            likelihood.estimate(llama, chunks[i : i + 1]).nll for i in (0, len(chunks) // 3, 2 * len(chunks) // 3)
        ]
    found = perplexity.perplexity(model, text, n_chunks=3, evenly=True, n_ctx=32, n_threads=2)
    assert found.nll == pytest.approx(np.mean(picked), rel=1e-5)
    whole = perplexity.perplexity(model, text, n_chunks=10**6, evenly=True, n_ctx=32, n_threads=2)
    assert whole.n_tokens == len(chunks) * 15


def test_table_of_methods_is_complete_and_resumes(made, tmp_path):
    """lab/scripts/prune_quality.py measures every method and allocation; a second run reuses the results on file."""
    _, model, text = made
    out = tmp_path / "table.md"
    tool = generators.ROOT / "lab" / "scripts" / "prune_quality.py"
    command = [sys.executable, tool, model, "-f", text, "--held-out", text]
    command += ["--chunks", "2", "--held-out-chunks", "2", "--sparsities", "0.8,0.9", "--sequential", "0.9", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.read_text().splitlines()]
    assert rows[0] == ["method", "allocation", "80%", "90%", "as it is"]
    with_statistics = ("Wanda", "Wanda, refit", "SparseGPT", "SparseGPT, refit", "ALPS")
    sequential = ("Wanda, sequential", "SparseGPT, sequential", "ALPS, sequential")
    once = ("magnitude, row", "magnitude, tensor", *with_statistics)
    assert [r[:2] for r in rows[2:]] == [
        *([method, allocation] for method in once for allocation in ("uniform", "loss")),
        *([method, "uniform"] for method in sequential),
        ["**model**", ""],
    ]
    results = json.loads(out.with_suffix(".json").read_text())
    assert len(results) == 1 + 2 * len(once) * 2 + len(sequential)
    assert len({r["ppl"] for r in results.values()}) > 10 and len({r["tokens"] for r in results.values()}) == 1
    before = out.read_text()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and again.stderr == "" and out.read_text() == before
