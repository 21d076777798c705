"""Pictures that come whatever there is to draw, with the numbers that were written; tables as text."""

import json
import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from mgrpo_jax.report import curves
from mgrpo_jax.report.curves import learning_curve, series, smooth, table
from mgrpo_jax.statistics import wilson_interval


def write_run(path, accuracy, *, count=128, steps=None, agents=("main", "search")):
  with open(path, "w") as f:
    for i, a in enumerate(accuracy):
      step = steps[i] if steps else 5 * i
      row = {"step": step, "time": 0.0} | {f"train/{name}/reward": a + 0.1 for name in agents}
      f.write(json.dumps(row) + "\n")
      evaluation = {"eval/validation/accuracy": a} | ({"eval/validation/count": count} if count else {})
      f.write(json.dumps({"step": step, "time": 0.0} | evaluation) + "\n")
  return path


@pytest.fixture
def drawn(monkeypatch):
  """The figures drawn, kept for looking into."""
  figures = []
  save = Figure.savefig
  monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
  return figures


def lines(axes):
  return {l.get_label(): l for l in axes.get_lines() if not l.get_label().startswith("_")}


def band(axes, i=0):
  """(lowest, highest) of a filled band at each of its x."""
  points = axes.collections[i].get_paths()[0].vertices
  at = {x: points[points[:, 0] == x, 1] for x in np.unique(points[:, 0])}
  return {x: (y.min(), y.max()) for x, y in at.items()}


def texts(axes):
  return [t.get_text() for t in axes.texts]


def test_one_seed_has_its_wilson_band_and_final_value(tmp_path, drawn):
  path = write_run(tmp_path / "m", [0.25, 0.375, 0.5])
  out = learning_curve({"joint": [path]}, tmp_path / "new" / "curve.png", title="atlas")
  upper, lower = drawn[0].axes
  line = lines(upper)["joint  (95 % of 128 questions)"]
  np.testing.assert_array_equal(line.get_xydata(), [[0, 0.25], [5, 0.375], [10, 0.5]])
  assert band(upper)[5] == pytest.approx(wilson_interval(48, 128))
  assert texts(upper) == ["0.50"]
  assert set(lines(lower)) == {"main", "search"}
  assert upper.get_ylabel() == "validation accuracy" and lower.get_ylabel() == "training reward"
  pixels = imread(out)
  assert pixels.shape[0] > 500 and pixels.std() > 0.05
  assert [p.name for p in out.parent.iterdir()] == ["curve.png"]


def test_several_seeds_have_their_mean_between_lowest_and_highest(tmp_path, drawn):
  accuracies = [[0.2, 0.3, 0.6], [0.1, 0.5, 0.3], [0.3, 0.4]]  # the last seed was stopped earlier
  paths = [write_run(tmp_path / f"m{i}", a) for i, a in enumerate(accuracies)]
  other = write_run(tmp_path / "o", [0.2, 0.25, 0.26])
  learning_curve({"joint": paths, "frozen": [other]}, tmp_path / "c.png")
  upper, *lower = drawn[0].axes
  line = lines(upper)["joint  (mean, min to max of 3 seeds)"]
  np.testing.assert_allclose(line.get_xydata(), [[0, 0.2], [5, 0.4], [10, 0.45]])
  assert band(upper)[5] == pytest.approx((0.3, 0.5)) and band(upper)[10] == pytest.approx((0.3, 0.6))
  assert sorted(texts(upper)) == ["0.26", "0.45"]
  assert [a.get_title(loc="left") for a in lower] == ["training reward of main", "training reward of search"]


def test_other_accuracies_can_be_drawn_and_counts_may_be_missing(tmp_path, drawn):
  path = tmp_path / "m"
  path.write_text("".join(json.dumps({"step": s, "train/accuracy": s / 10, "eval/test/accuracy": 0.5}) + "\n"
                          for s in range(3)))  # fmt: skip
  learning_curve({"joint": [path]}, tmp_path / "c.png", keys=("train/accuracy", "eval/test/accuracy"))
  (axes,) = drawn[0].axes
  assert set(lines(axes)) == {"joint, train accuracy  (one seed)", "joint, test accuracy  (one seed)"}


@pytest.mark.parametrize(
  "content",
  [
    None,
    "",
    '{"step": 0, "time": 1.0}\n',
    '{"step": 0, "eval/validation/accuracy": 0.0, "eval/validation/count": 4, "train/main/reward": 0.1}\n',
    '{"step": 0, "eval/validation/accuracy": null, "nan/eval/validation/accuracy": "nan"}\n',
    '{"step": 3, "train/main/reward": 0.5}\n{"step": 4, "tr',
    '{"step": 0, "eval/validation/accuracy": 1.0, "eval/validation/count": 0}\n',
  ],
)
def test_short_and_empty_runs_are_drawn_without_complaint(tmp_path, content):
  path = tmp_path / "m"
  if content is not None:
    path.write_text(content)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    out = learning_curve({"joint": [path]}, tmp_path / "c.png")
    learning_curve({"joint": [path, path], "b": []}, tmp_path / "d.png")
  assert imread(out).shape[2] in (3, 4)


def test_nothing_at_all_is_drawn_too(tmp_path, drawn):
  learning_curve({}, tmp_path / "c.png")
  assert texts(drawn[0].axes[0]) == ["no evaluation yet"]


def test_a_picture_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
  out = learning_curve({}, tmp_path / "c.png")
  before = out.read_bytes()

  def fail(self, file, *args, **kwargs):
    file.write(b"half a picture")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(Figure, "savefig", fail)
  with pytest.raises(OSError):
    learning_curve({}, out)
  assert out.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_end_labels_do_not_overlap(tmp_path, drawn):
  ends = {"a": 0.500, "b": 0.502, "c": 0.499}
  runs = {name: [write_run(tmp_path / name, [0.2, end], agents=())] for name, end in ends.items()}
  learning_curve(runs, tmp_path / "c.png")
  (axes,) = drawn[0].axes
  boxes = sorted((t.get_window_extent() for t in axes.texts), key=lambda b: b.y0)
  assert len(boxes) == 3
  assert all(below.y1 <= above.y0 + 1 for below, above in zip(boxes, boxes[1:]))


def test_a_series_is_sorted_and_keeps_the_last_of_a_step():
  rows = [{"step": 2, "a": 0.2}, {"step": 0, "a": 0.0}, {"step": 2, "a": 0.3}, {"step": 3, "a": None}]
  rows.append({"step": 4})
  steps, values = series(rows, "a")
  np.testing.assert_array_equal(steps, [0, 2])
  np.testing.assert_array_equal(values, [0.0, 0.3])


def test_smoothing_is_an_unbiased_mean_of_the_past():
  np.testing.assert_allclose(smooth(np.full(9, 0.7), 3), 0.7)
  np.testing.assert_allclose(smooth(np.array([1.0, 0.0, 0.0]), 1), [1, 1 / 3, 1 / 7])
  assert smooth(np.array([]), 2).shape == (0,)


def test_a_table_is_markdown_that_reads_as_text():
  text = table([["joint", 0.51234, 384], ["main | frozen", None, 12], ["x\ny", float("nan"), np.int64(7)]],
               ["system", "accuracy", "n"])  # fmt: skip
  assert text == "\n".join([
    "| system         | accuracy |   n |",
    "|----------------|---------:|----:|",
    "| joint          |    0.512 | 384 |",
    "| main \\| frozen |        - |  12 |",
    "| x y            |        - |   7 |",
  ])  # fmt: skip
  assert table([], ["a"]) == "| a   |\n|-----|"
  with pytest.raises(ValueError, match="row 1 has 1 cells"):
    table([[1, 2], [1]], ["a", "b"])


def test_there_is_a_colour_for_every_agent_and_more(tmp_path):
  names = [f"agent{i}" for i in range(len(curves._COLOURS) + 2)]
  learning_curve({"joint": [write_run(tmp_path / "m", [0.1, 0.2], agents=names)]}, tmp_path / "c.png")
