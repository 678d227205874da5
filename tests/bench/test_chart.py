"""Pictures: well-formed, complete, and refused early where they cannot be written."""

import xml.etree.ElementTree as ElementTree

import pytest

import microparallel as mp
from microparallel.bench.all_reduce import BOUND, BOUND_IN_PLACE, SHM, SHM_IN_PLACE, TORCH_ON_SHM, Measurements, Timing
from microparallel.bench.all_reduce_report import plot_all_reduce, report_on
from microparallel.bench.chart import Line, Panel, Point, draw_chart, require_drawable, write_picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def report(ranks=4, algorithms=tuple(mp.collectives.ALL_REDUCES), sizes=(4_000, 1_000_000), transport="gloo"):
    others = (TORCH_ON_SHM, SHM, SHM_IN_PLACE, BOUND, BOUND_IN_PLACE) if transport == "shm" else ()
    timings = [
        Timing(method, size, (1e-4 + size * 1e-9 * factor, 2e-4 + size * 1e-9 * factor))
        for size in sizes
        for factor, method in enumerate(("torch", *others, *algorithms, "add"), 1)
    ]
    return report_on(Measurements(ranks, ranks, 2, transport, "cpu", "float32", tuple(timings)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_plot_names_everything_it_shows(ranks):
    words = texts(plot_all_reduce(report(ranks)))
    assert {"torch", *mp.collectives.ALL_REDUCES} <= set(words)
    assert "time of a call" in words and "size of the tensor" in words and ("bus bandwidth" in words) == (ranks > 1)
    assert ("predicted" in words) == (ranks > 1)
    assert {"10 KB", "1 MB", "1 ms"} <= set(words)
    assert any(word.startswith(f"All-reduce, {ranks} rank") for word in words)


def test_the_plot_has_a_line_for_each_algorithm_and_a_dashed_one_for_its_prediction():
    root = ElementTree.fromstring(plot_all_reduce(report(algorithms=("ring", "tree"))))
    lines = [line for line in root.iter(f"{SVG}polyline") if line.get("points").count(",") == 2]
    dashed = [line for line in lines if line.get("stroke-dasharray")]
    assert len(dashed) == 2 + 1  # and the legend's
    measured = [line for line in lines if not line.get("stroke-dasharray") and not line.get("stroke-opacity")]
    assert len(measured) == 3 * 2 + 3  # three methods in two panels, and the legend's
    assert sum(line.get("stroke-width") == "3.0" for line in measured) == 2 + 1  # torch's own is the thick one


def test_what_goes_through_shared_memory_is_drawn_below_what_memory_allows():
    svg = plot_all_reduce(report(transport="shm"))
    words = texts(svg)
    assert {"torch on gloo", TORCH_ON_SHM, SHM, SHM_IN_PLACE, "bound", *mp.collectives.ALL_REDUCES} <= set(words)
    assert "torch" not in words and BOUND_IN_PLACE not in words
    lines = list(ElementTree.fromstring(svg).iter(f"{SVG}polyline"))
    dotted = [line for line in lines if line.get("stroke-linecap") == "round"]
    assert len(dotted) == 2 * 2 + 1  # one for each kind of tensor in two panels, and the legend's
    assert not any(line.get("stroke-linecap") for line in ElementTree.fromstring(plot_all_reduce(report())).iter())


def test_no_two_lines_look_alike():
    root = ElementTree.fromstring(plot_all_reduce(report(transport="shm", sizes=(4_000,))))
    markers = [(mark.get("d"), mark.get("fill")) for mark in root.iter(f"{SVG}path")]
    methods = 4 + len(mp.collectives.ALL_REDUCES)
    assert len(markers) == 3 * methods and len(set(markers)) == methods  # in two panels and the legend


def test_a_single_size_and_left_out_methods_can_be_drawn():
    assert "torch" in texts(plot_all_reduce(report(sizes=(4_000,))))
    left_out = (Timing("torch", 8, (1.0,)), Timing("ring", 8, (), "no time"), Timing("add", 8, (1.0,)))
    assert "ring" not in texts(plot_all_reduce(report_on(Measurements(2, 2, 2, "gloo", "cpu", "float32", left_out))))


def test_points_lie_where_their_logarithms_say():
    line = Line("a", [Point(10, 1, 1, 1), Point(100, 10, 10, 10), Point(1000, 100, 100, 100)])
    root = ElementTree.fromstring(draw_chart("t", "s", [Panel("p", "x", [line], str, str)]))
    points = next(line.get("points") for line in root.iter(f"{SVG}polyline") if line.get("points").count(",") == 3)
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points.split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x1 > x0
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2) and y1 < y0


def test_text_is_escaped():
    line = Line("<a & b>", [Point(1, 1, 1, 1)])
    assert "<a & b>" in texts(draw_chart("1 < 2", "", [Panel("p", "x", [line], str, str)]))


def test_svg_is_written_as_it_is(tmp_path):
    require_drawable(tmp_path / "plot.svg", "--plot")
    assert list(tmp_path.iterdir()) == []
    write_picture("<svg/>", tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == "<svg/>"


def test_png_is_a_png_or_says_what_it_needs(tmp_path, monkeypatch):
    path = tmp_path / "plot.PNG"
    try:
        require_drawable(path, "--plot")
    except mp.errors.UsageError:
        pytest.skip("nothing here makes PNGs")
    write_picture(plot_all_reduce(report()), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(mp.errors.UsageError, match=r"pip install 'microparallel.plot.'.*plot\.svg"):
        require_drawable(path, "--plot")


def test_resvg_is_used_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "resvg_py.py").write_text(
        "def svg_to_bytes(svg_string, zoom): return b'\\x89PNG by resvg' + str(zoom).encode()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "")
    require_drawable(tmp_path / "plot.png", "--plot")
    write_picture("<svg/>", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes() == b"\x89PNG by resvg2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plot.pdf", r"ends in \.svg or \.png; try .*plot\.svg"),
        ("plot", r"ends in \.svg or \.png"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, name, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        require_drawable(tmp_path / name, "--plot")
