"""The demo model's engines in each form of input: AP, results, times with and without the upload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.open import open_runner
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import metadata_of, set_metadata
from utils.runners.base import as_feed
from utils.trt.build import build
from utils.trt.preflight import BuildConfig

FORMS = {"float": FLOATS, "uint8": InputSpec("uint8"), "uint8-nhwc": InputSpec("uint8", "nhwc")}
BATCH = 8


@dataclass(frozen=True)
class Built:
    name: str
    engine: Path
    onnx: Path
    form: InputSpec


@pytest.fixture(scope="module")
def built(demo_onnx, tmp_path_factory) -> dict[str, Built]:
    """An engine for each form, built from the file that takes floats; at a low optimization level."""
    folder, found = tmp_path_factory.mktemp("forms"), {}
    cache = demo_onnx.with_name("gpu-tests.timing.cache")
    original = onnx.load(demo_onnx)
    for name, form in FORMS.items():
        graph, file = take_bytes(original, form), folder / f"{name}.onnx"
        onnx.save(set_metadata(graph, {**metadata_of(original), **form.metadata()}), file)
        config = BuildConfig(batch=(1, BATCH, 32), timing_cache=cache, optimization_level=2,
                             progress=False)  # fmt: skip
        engine = file.with_suffix(".engine")
        build(file, engine, config)
        found[name] = Built(name, engine, file, form)
    return found


@pytest.fixture(scope="module")
def ap(built, demo_data) -> dict[str, float]:
    """AP of each engine on the demo set."""
    found = {}
    for name, one in built.items():
        with open_runner(one.engine, "cuda:0") as runner:
            found[name] = evaluate(runner, demo_data, EvalConfig(imgsz=320, workers=8), progress=False).ap
    print("AP", ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return found


@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_ap_is_that_of_floats(name, ap):
    assert ap["float"] > 0.5
    assert ap[name] == pytest.approx(ap["float"], abs=0.001)


@pytest.mark.parametrize("name", FORMS)
def test_results_are_onnx_runtimes(name, built):
    """At every batch size, with feeds in pageable and pinned memory and on the GPU, with and without a graph."""
    one = built[name]
    with open_runner(one.engine, "cuda:0") as runner, open_runner(one.onnx, "cpu") as reference:
        assert (runner.input_spec, runner.inputs[0].dtype) == (one.form, reference.inputs[0].dtype)
        for batch in (BATCH, BATCH, 1, 3, BATCH):
            generator = torch.Generator().manual_seed(batch)
            pixels = torch.randint(0, 256, (batch, 3, 320, 320), dtype=torch.uint8, generator=generator)
            feed = as_feed(pixels, one.form, reference.inputs[0].dtype).contiguous()
            on_gpu = as_feed(pixels.cuda(), one.form, reference.inputs[0].dtype)
            assert torch.equal(on_gpu.cpu(), feed) or one.form == FLOATS  # a division in FP32 is rounded otherwise
            expected = reference.infer({"images": feed})["output0"].clone()
            for same in (feed, feed.pin_memory(), feed.cuda(), on_gpu):
                found = runner.infer({"images": same})["output0"].float().cpu()
                assert (found[:, 4:] - expected[:, 4:]).abs().mean() < 0.005
                assert (found[:, :4] - expected[:, :4]).abs().median() < 2


@pytest.mark.parametrize(("name", "dtype"), [("float", torch.uint8), ("uint8", torch.float32)])
def test_other_arrays_get_one_line(name, dtype, built):
    with open_runner(built[name].engine, "cuda:0") as runner, pytest.raises(InputError, match="the network takes"):
        runner.infer({"images": torch.zeros(BATCH, 3, 320, 320, dtype=dtype)})
