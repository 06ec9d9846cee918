"""Speed of evaluating an engine, against the plain loop that one would write first, over the same engine.

The plain loop takes one image at a time, waits for the GPU, and does letterboxing, NMS and matching on the CPU.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

TARGET = 5.0  # times the images/s of the plain loop
COPIES = 40  # of each image: the set is small, and starting the worker processes would be all that is seen
PLAIN = 400  # images for the plain loop


def plain_loop(runner, data, count):
    """Images per second, and AP, of the plain loop on so many images."""
    from utils.core.tasks import DETECT, prediction_of
    from utils.evaluation.images import decode
    from utils.evaluation.letterbox import boxes_to_image, letterboxed_planes
    from utils.evaluation.metrics import match, score
    from utils.evaluation.nms import non_max_suppression

    images = data.read("val", count).images
    began = time.perf_counter()
    correct, found, labels = [], [], []
    for entry in images:
        planes, box = letterboxed_planes(decode(entry.path), (320, 320), (320, 320))
        pixels = planes.astype(np.float32) / 255
        raw = runner.infer({"images": torch.from_numpy(pixels)[None]})["output0"].cpu()
        (detections,) = non_max_suppression(prediction_of(DETECT, raw), 0.001, 0.7)
        owners = torch.zeros(len(detections), dtype=torch.long)
        detections[:, :4] = boxes_to_image(detections[:, :4], owners, [box.shapes])
        size = np.array([*entry.size, *entry.size], dtype=np.float32)
        rows = entry.labels.rows
        middle, half = rows[:, 1:3], rows[:, 3:] / 2
        corners = np.concatenate([middle - half, middle + half], 1) * size
        truth = torch.from_numpy(np.concatenate([rows[:, :1], corners], 1).astype(np.float32))
        correct += match([detections], [truth])
        found.append(detections[:, 4:])
        labels.append(truth[:, 0])
    correct, found, labels = (torch.cat(rows).numpy() for rows in (correct, found, labels))
    ap = score(correct, found[:, 0], found[:, 1], labels).mean().ap
    return len(images) / (time.perf_counter() - began), ap


@pytest.fixture
def many(demo_data, tmp_path):
    """The demo set's images, several times each."""
    from utils.evaluation.data_yaml import load_data

    folder = Path(demo_data.paths("val")[0])
    images = sorted(str(path) for path in folder.iterdir())
    (tmp_path / "val.txt").write_text("".join(f"{path}\n" for path in images * COPIES))
    content = {"path": str(tmp_path), "train": "val.txt", "val": "val.txt", "names": dict(demo_data.names)}
    (tmp_path / "data.yaml").write_text(json.dumps({**content, "names": list(demo_data.names.values())}))
    return load_data(tmp_path / "data.yaml")


def test_the_loop_is_bound_by_the_engine_or_by_decoding(demo_engine, demo_data, many):
    from utils.evaluation.loop import EvalConfig, evaluate
    from utils.jobs.open import open_runner

    config = EvalConfig(imgsz=320)  # batches of 32, 8 workers
    with open_runner(demo_engine, "cuda:0") as runner:
        evaluate(runner, demo_data, config, progress=False)  # warm
        result = evaluate(runner, many, config, progress=False)
        whole = evaluate(runner, demo_data, config, progress=False)
        plain_loop(runner, demo_data, 20)  # warm
        plain, plain_ap = plain_loop(runner, demo_data, PLAIN)
        rest = evaluate(runner, demo_data, EvalConfig(imgsz=320, limit=PLAIN), progress=False)
    seconds = sum(result.parts.values())  # from the first image on, as in the plain loop
    speed = result.images / seconds
    shares = {name: part / seconds for name, part in result.parts.items()}
    found = {
        "measured_on": f"{result.measured_on}; {len(os.sched_getaffinity(0))} cores",
        "images": result.images,
        "images_per_second": speed,
        "plain_images_per_second": plain,
        "ratio": speed / plain,
        "shares": shares,
        "ms_per_image": result.ms,
        "seconds": {"reading labels, starting workers": result.seconds - seconds, "images": seconds},
        "ap": whole.ap,
    }
    print(json.dumps(found, indent=1))
    if os.environ.get("BENCHMARK_REPORT"):
        Path(os.environ["BENCHMARK_REPORT"]).write_text(json.dumps(found, indent=1) + "\n")
    assert plain_ap == pytest.approx(rest.ap, abs=0.003)
    assert speed >= TARGET * plain
