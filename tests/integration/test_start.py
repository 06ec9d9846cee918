"""What programs import at their start, and upstream's own programs, whose plots need what ours do not import."""

import subprocess
import sys

import cv2
import pytest

HEAVY = ("seaborn", "pandas", "scipy", "matplotlib", "torchvision", "torch._dynamo", "thop")
ENDING = """
import atexit, runpy, sys
heavy, sys.argv = sys.argv[1].split(","), sys.argv[2:]
sys.path.insert(0, "")
atexit.register(lambda: print("heavy:", *[name for name in heavy if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", [("qat.py", "eval", "--weights"), ("val_trt.py",)])
def test_evaluation_does_not_import_what_only_plots_need(checkout, data, small_weights, tmp_path, program):
    words = [*program, small_weights, "--data", data, "--device", "cpu", "--imgsz", 64, "--workers", 0]
    command = [sys.executable, "-c", ENDING, ",".join(HEAVY), *map(str, words), "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def test_libraries_that_are_deferred_are_whole_when_something_of_them_is_used(checkout):
    code = (
        "from utils.upstream.checkout import import_upstream\n"
        "import_upstream()\n"
        "import sys\n"
        "assert 'pandas' not in sys.modules\n"
        "import utils.general as general, utils.plots as plots, utils.augmentations as augmentations\n"
        "assert general.pd.DataFrame({'a': [1, 2]}).a.sum() == 3\n"
        "assert callable(plots.sn.heatmap) and plots.plt.figure() and augmentations.T.Compose([])\n"
        "import matplotlib, pandas, seaborn, torchvision\n"
        "assert general.pd.DataFrame is pandas.DataFrame and general.torchvision.ops.nms is torchvision.ops.nms\n"
        "assert pandas.options.display.max_rows and matplotlib.get_backend().lower() == 'agg'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '')\n{code}"],
        cwd=checkout, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]


def test_a_plot_that_is_drawn_when_the_program_ends_is_finished(checkout, tmp_path):
    program = tmp_path / "draw.py"
    program.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from utils.metrics import plot_pr_curve\n"
        "import utils.metrics as metrics\n"
        "class Axis:\n"
        "    def __getattr__(self, name): return lambda *_, **__: None\n"
        "class Figure:\n"
        "    def savefig(self, path, **_):\n"
        "        time.sleep(2)\n"
        "        Path(path).write_text('whole')\n"
        "metrics.plt.subplots = lambda *_, **__: (Figure(), Axis())\n"
        "metrics.plt.close = lambda *_: None\n"
        "plot_pr_curve(metrics.np.zeros(2), metrics.np.zeros((1, 2)), metrics.np.zeros((1, 1)), sys.argv[1])\n"
    )
    words = [sys.executable, "scripts/run_upstream.py", str(program), str(tmp_path / "plot.png")]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    assert (tmp_path / "plot.png").read_text() == "whole"


def test_upstreams_evaluation_draws_its_plots(checkout, data, demo_weights, tmp_path):
    words = ["scripts/run_upstream.py", "val.py", "--weights", demo_weights, "--data", data, "--imgsz", 64]
    words += ["--device", "cpu", "--workers", 0, "--batch-size", 4, "--project", tmp_path, "--name", "drawn"]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=checkout, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-800:]
    for name in ("confusion_matrix.png", "PR_curve.png", "F1_curve.png", "val_batch0_labels.jpg"):
        picture = cv2.imread(str(tmp_path / "drawn" / name))
        assert picture is not None, name
        assert picture.std() > 1, name  # not one colour
