"""Plots: every label is readable, nothing overlaps an axis, and no picture is overwritten by accident."""

from __future__ import annotations

import itertools

import pytest

from support import generators, gguf_bytes

pytest.importorskip("matplotlib", reason="matplotlib is optional")

from ggml_macko.benchmark import plot  # noqa: E402
from ggml_macko.benchmark.forms import DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED  # noqa: E402

# a report on docs-23m with long names and with forms that are close together
POINTS = [
    plot.Point("docs-23m-f16", DENSE, 16.0, 9.73),
    plot.Point("Q8_0", QUANTIZED, 8.5, 9.75),
    plot.Point("Q6_K", QUANTIZED, 6.6, 9.77),
    plot.Point("Q5_K_M", QUANTIZED, 5.7, 9.83),
    plot.Point("Q4_K_M", QUANTIZED, 4.9, 10.10),
    plot.Point("Q4_0", QUANTIZED, 4.7, 10.42),
    plot.Point("Q3_K_M", QUANTIZED, 4.1, 11.06),
    plot.Point("Q2_K", QUANTIZED, 3.3, 16.34),
    plot.Point("docs-23m-s70-f16 macko", SPARSE, 7.9, 10.18),
    plot.Point("docs-23m-s70-f16 sparse-q8", SPARSE_QUANTIZED, 4.1, 10.20),
    plot.Point("docs-23m-s70-f16 sparse-q5", SPARSE_QUANTIZED, 3.4, 10.23),
    plot.Point("docs-23m-s70-f16 sparse-q4", SPARSE_QUANTIZED, 3.13, 10.32),
    plot.Point("docs-23m-s70-f16 sparse-q3", SPARSE_QUANTIZED, 3.12, 10.55),
]


def test_labels_cover_neither_each_other_nor_markers_nor_axes():
    panels = [plot.Panel("bits per weight", POINTS), plot.Panel("tokens/s", [p._replace(x=900 / p.x) for p in POINTS])]
    figure = plot.draw(panels, "a report")
    figure.draw_without_rendering()
    for axes, panel in zip(figure.axes, panels):
        labels = [t for t in axes.texts if t.get_text()]  # the others are lines from a label to its marker
        assert sorted(t.get_text() for t in labels) == sorted(p.label for p in panel.points)
        boxes = [t.get_window_extent() for t in labels]
        markers = axes.transData.transform([(p.x, p.y) for p in panel.points])
        for a, b in itertools.combinations(boxes, 2):
            assert not a.overlaps(b)
        for box in boxes:
            assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            assert not any(box.contains(x, y) for x, y in markers)


def test_density_map_has_a_cell_for_each_matrix_of_each_layer():
    cells = [plot.Cell(i, m, 0.3 + i / 10) for i in range(3) for m in ("attn_q", "ffn_up") if (i, m) != (1, "ffn_up")]
    figure = plot.draw_density(cells, "a model: density")
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (2, 3) and image[0, 2] == pytest.approx(0.5) and image.mask.sum() == 1
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["attn_q", "ffn_up"]
    assert figure.get_suptitle() == "a model: density" and figure.axes[0].get_xlabel() == "layer"
    assert figure.get_facecolor() == (1, 1, 1, 1)  # opaque: readable on a dark page


@pytest.mark.parametrize("name", ["$\\frac$", "100 $ or 200 $", "a$_$b"])
def test_dollar_sign_in_a_name_begins_no_formula(name):
    """draw_without_rendering() parses all texts, including formulas."""
    assert plot.draw([plot.Panel(name, [plot.Point(name, DENSE, 1, 2), *POINTS])], name).get_suptitle() == name
    plot.draw_density([plot.Cell(0, name, 0.5)], name).draw_without_rendering()


def test_name_that_is_not_utf8_is_drawn_with_escapes(tmp_path):
    figure = plot.draw([plot.Panel("x", [plot.Point("caf\udce9", DENSE, 1, 2), *POINTS])], "m\udcff")
    plot.save_as(figure, str(tmp_path / "p.svg"))
    drawn = (tmp_path / "p.svg").read_text()
    assert r"caf\udce9" in drawn and r"m\udcff" in drawn


@pytest.mark.parametrize(
    "names, limit",
    [
        (["blk.99999999.attn_q.weight"], "blk.99999999.attn_q.weight: 100000000 layers, 1 matrices in a layer"),
        (["blk.512.attn_q.weight"], "blk.512.attn_q.weight: 513 layers"),
        (
            [f"blk.0.a{i}.weight" for i in range(200)],
            "1 layers, 200 matrices in a layer; a plot shows at most 512 and 128",
        ),
    ],
)
def test_number_in_a_name_makes_no_huge_plot(tmp_path, macko, names, limit):
    f = gguf_bytes.GGUF()
    f.set("general.architecture", gguf_bytes.STRING, b"llama")
    for name in names:
        f.tensors.append(gguf_bytes.Tensor(name.encode(), [8, 4], 1, bytes(64)))
    (tmp_path / "model.gguf").write_bytes(gguf_bytes.write(f))
    done = macko("inspect", tmp_path / "model.gguf", "--plot", tmp_path / "p.png")
    assert done.code == 1 and f"error: --plot: {tmp_path}/model.gguf: " in done.err and limit in done.err, done.err
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_picture_that_exists_is_kept_without_force(tmp_path, macko, suffix):
    picture = tmp_path / f"density.{suffix}"
    picture.write_bytes(b"mine")
    done = macko("inspect", generators.DEMO, "--plot", picture)
    assert done.code == 1 and "exists; use --force" in done.err and picture.read_bytes() == b"mine"
    done = macko("inspect", generators.DEMO, "--plot", picture, "--force")
    assert done.code == 0 and picture.read_bytes()[:4] == plot.SIGNATURES[f".{suffix}"]
    assert [p.name for p in tmp_path.iterdir()] == [picture.name]


def test_unknown_suffix_is_refused_before_the_model_is_read(tmp_path, macko):
    done = macko("inspect", tmp_path / "missing.gguf", "--plot", tmp_path / "density.jpg")
    assert done.code == 1 and "a plot ends in .png, .svg, .pdf" in done.err
