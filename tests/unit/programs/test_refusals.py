"""What programs cannot use: exit code 2, one line that names the option or the file, and nothing is written.

`tests/golden/test_bad_inputs.py` has the refusals that need a checkpoint. TensorRT is a stand-in here.
"""

import json
import os

import onnx
import pytest
from boxes_graph import write_boxes, write_engine
from known_images import SQUARE, KnowingModel, export_answers, write_set
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.onnx_graph.view import set_metadata
from utils.reports.schema import Report

Q, X, DS, R, V = "qat.py", "export_qat.py", "export_yoloV9.py", "reparameterization.py", "val_trt.py"
B, T, L, M, S, C = (f"scripts/{name}.py" for name in ("build_engine", "benchmark_trt", "inspect_engine", "make_report",
                                                      "make_triton", "triton_client"))  # fmt: skip
EVAL = "--data data.yaml --device cpu --workers 0"
DRAW = "--engine-file fixed.onnx --device cpu --exist-ok"

CASES = [  # program, arguments, what the line names
    # what can do nothing where it is given
    *((V, f"--engine-file a.onnx --source a.png {flag}", flag) for flag in ("--save-conf", "--verbose", "--no-draw")),
    (V, f"--engine-file a.onnx {EVAL} --save-txt --no-draw", "--no-draw"),
    *((X, f"--weights a.pt --imgsz 64 {flag}", flag.split()[0]) for flag in ("--nms onnx", "--mask-resolution 5")),
    (X, "--verify a.onnx --simplify", "--simplify"),
    (X, "--weights a.pt --include onnx_end2end --nms none --iou-thres 0.5", "--iou-thres"),
    (X, "--weights a.pt --include onnx_end2end --mask-resolution 1025", "--mask-resolution"),
    (B, "a.onnx --timing-cache a --no-timing-cache", "--no-timing-cache"),
    (B, "a.onnx --target SM89 --hardware-compatible ampere+", "--hardware-compatible"),
    (B, "a.onnx --strip-weights", "leave out --strip-weights"),
    (L, "a.onnx", "a.onnx is an ONNX file; expected an engine: --runtime openvino"),
    (L, "a.engine --runtime openvino", "a.engine"),
    (L, "a.onnx --device openvino:CPU --generate-graph", "--generate-graph"),
    (T, "a.onnx --runtime openvino --optimization-level 2", "--optimization-level"),
    (T, "a.onnx --device 0 --runtime openvino", "--device 0"),
    (T, "a.onnx --device openvino-GPU", "--device openvino-GPU"),
    (T, "a.onnx --device cpu --precision bf16", "--precision"),
    (T, "a.onnx --device cpu --builds 2", "--builds"),
    (T, "a.onnx --device cpu --optimization-level 2", "--optimization-level"),
    (T, "a.engine --tune 10", "--tune"),
    (M, "runs/a --samples 3", "--samples"),
    (M, "--environment --title a", "--title"),
    (S, "--check a --name b", "--name"),
    # options that contradict each other or the file
    (V, f"--engine-file a.onnx {EVAL} --imgsz 64 96 128", "--imgsz"),
    *((V, f"{words} {EVAL}", "--engine-file") for words in ("", "a.onnx --engine-file a.onnx", "--source a.png")),
    (V, f"a.onnx {EVAL} --imgsz 64 --unlabelled", "--reference"),
    (V, f"{EVAL} --imgsz 64x96 --engine-file fixed.onnx", "[16, 3, 64, 64]"),
    (V, f"--engine-file a.onnx {EVAL} --device 7", "--device"),
    (B, "a.onnx --batch-size 1 2", "--batch-size"),
    (B, "a.onnx --imgsz 64 32 128", "min <= opt <= max"),
    (B, "a.onnx --imgsz 50", "multiples of the stride, 32"),
    (B, "a.onnx --target SM89", "--target"),
    (B, "a.onnx --tune 5 --target SM89", "--target"),
    (B, "int8.onnx --tune 5 --precision fp16", "int8.onnx"),
    (B, "a.onnx --tune 5 --max-aux-streams 2 --optimization-level 2", "--max-aux-streams"),
    (B, "fixed.onnx --batch-size 8", "fixed.onnx"),
    (T, "a.engine --device cpu", "a.engine"),
    (T, "a.onnx --sweep 4 --batch-size 1", "--sweep"),
    (T, "a.onnx images/../a.onnx --device cpu", "have the same name"),
    (T, "int8.onnx --imgsz 64 32", "int8.onnx takes images of 32x32 only"),
    (S, "boxes-nms.onnx --class-agnostic", "--class-agnostic"),
    (S, "boxes.onnx --platform tensorrt", "--platform"),
    (S, "boxes.engine --max-batch-size 32", "--max-batch-size"),
    (C, "m", "--source"),
    (C, "m --source a.png --url http://a", "--url"),
    (C, "m --source a.png --url 127.0.0.1:9", "127.0.0.1:9"),
    # files
    *((V, f"--engine-file {name} {EVAL} --imgsz 64", name)
      for name in ("damaged.onnx", "a.png", "images", "folder.onnx")),
    (V, f"--weights deepstream.onnx {EVAL}", "DeepStream"),
    (V, f"a.onnx {EVAL} --imgsz 64 --project a.yaml", "a.yaml/exp"),
    (V, f"--engine-file a.engine {EVAL}", "a.engine"),
    *((V, f"--engine-file a.onnx --imgsz 64 --workers 0 --device cpu --data {name}", name)
      for name in ("none.yaml", "a.onnx", "four.yaml")),
    (V, "--engine-file a.onnx --imgsz 64 --workers 0 --device cpu --data bad.yaml", "bad/labels/a.txt"),
    *((V, f"--engine-file a.onnx --imgsz 64 --device cpu --source {name}", name)
      for name in ("none", "empty", "*.gif", "17", "http://127.0.0.1:9/live")),
    (V, "a.onnx --imgsz 64 --device cpu --source http://127.0.0.1:9/a.png", "127.0.0.1:9/a.png cannot be opened"),
    (T, "qat.pt", "qat.pt"),
    (T, "int8.onnx --baseline none.onnx", "none.onnx"),
    (M, "", "--environment"),
    (M, "runs/exp/weights", "runs/exp/weights/report.json does not exist"),
    (S, "", "--check"),
    (S, "--check none", "none"),
    *((S, name, name) for name in ("a.png", "none.onnx", "images")),
    (S, "boxes.onnx --output boxes.onnx", "boxes.onnx"),
    (C, "m --source none.png", "none.png"),
    # what cannot be written is said before anything is read; nothing is made on the way
    *((Q, f"{command} --data data.yaml --weights a.pt --project a.png/new", "a.png/new") for command in
      ("quantize", "sensitive", "calibrate", "eval")),
    (V, f"--engine-file damaged.onnx {EVAL} --project a.png", "a.png/exp"),
    (X, "--weights a.pt --output a.png/new/a.onnx", "a.png/new/a.onnx"),
    (R, "--weights a.pt --save a.png/new/b.pt", "a.png/new/b.pt"),
    # what is no checkpoint is called what it is
    *((program, f"{command} --weights a.onnx", "an ONNX file") for program, command in
      ((Q, "quantize --data data.yaml"), (Q, "eval --data data.yaml"), (X, ""), (DS, ""), (R, ""))),
    (Q, "quantize --data data.yaml --weights a.engine", "a TensorRT engine"),
    # what is read is not written over
    (X, "--weights mine.onnx", "mine.onnx"),
    (X, "--weights a.pt --data link.yaml --output link2.onnx", "link.yaml"),
    (DS, "--weights config_infer_primary_yoloV9.txt", "config_infer_primary_yoloV9.txt"),
    (R, "--weights a.pt --save b.pt", "a.pt"),
    *((Q, f"{command} --data data.yaml --project runs --exist-ok --weights {words}", words.split()[-1])
      for command, words in (
          ("quantize", "runs/exp/weights/last.pt"), ("quantize", "runs/exp/weights/qat_best_x.pt"),
          ("sensitive", "a.pt --recipe runs/exp/recipe.yaml"), ("sensitive", "a.pt --profile runs/exp/state.pt"),
          ("calibrate", "a.pt --hyp runs/exp/calibration.json"), ("eval", "runs/exp/report.json"))),
    (B, "a.onnx --output a.onnx", "--output"),
    (B, "a.onnx --output b.trt", "expected .engine or .plan"),
    (B, "a.onnx --output b.engine --timing-cache b.engine.json", "--output"),
    (T, "int8.onnx int8-b1.engine --batch-size 1", "int8-b1.engine"),
    (T, "runs/exp/benchmark.onnx --project runs --exist-ok --batch-size 1", "runs/exp/benchmark.onnx"),
    (V, f"{DRAW} --source images/val --project images --name val", "images/val/000000000001.png"),
    (V, f"{DRAW} --data runs/exp/report.json --project runs --workers 0", "runs/exp/report.json"),
    (M, "report.html", "report.html"),
    (M, "runs/a runs/a/report-merged.json", "runs/a/report-merged.json"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the arguments name."""
    folder = tmp_path_factory.mktemp("files")
    model = KnowingModel(write_set(folder, 2, SQUARE), ("cat", "dog", "owl"), 64)
    for name in ("empty", "folder.onnx", "runs/exp/weights", "bad/images", "bad/labels"):
        (folder / name).mkdir(parents=True)
    image = (folder / "images/val/000000000001.png").read_bytes()
    for name in ("a.png", "bad/images/a.png"):
        (folder / name).write_bytes(image)
    (folder / "bad/labels/a.txt").write_text("3 0.5 0.5 0.1 0.1\n")
    for name in ("a.pt", "c.pt", "qat.pt", "a.engine", "mine.onnx", "link.pt", "link.yaml", "labels.txt", "a.yaml",
                 "config_infer_primary_yoloV9.txt", "runs/exp/weights/last.pt", "runs/exp/weights/qat_best_x.pt",
                 "runs/exp/recipe.yaml", "runs/exp/state.pt", "runs/exp/calibration.json",
                 "int8-b1.engine"):  # fmt: skip
        (folder / name).write_text(name)
    os.utime(folder / "int8-b1.engine", (1, 1))  # older than int8.onnx, so that it would be built again
    os.link(folder / "a.pt", folder / "b.pt")
    (folder / "link.onnx").symlink_to("link.pt")
    (folder / "link2.onnx").symlink_to("link.yaml")
    (folder / "runs/exp/benchmark.json").symlink_to("benchmark.onnx")
    export_answers(model, folder / "fixed.onnx", 16, 64)
    export_answers(model, folder / "a.onnx")
    (folder / "damaged.onnx").write_bytes((folder / "a.onnx").read_bytes()[:-300])
    onnx.save(set_metadata(onnx.load(folder / "a.onnx"), {"form": "deepstream"}), folder / "deepstream.onnx")
    for name in ("int8.onnx", "runs/exp/benchmark.onnx"):
        write_onnx(folder / name, ("b", 3, 32, 32), quantized=True)
    write_boxes(folder / "boxes.onnx")
    write_boxes(folder / "boxes-nms.onnx", end2end(NmsSettings("onnx")))
    write_engine(folder / "boxes.engine", folder / "boxes.onnx")
    for name in ("runs/a/report.json", "runs/a/report-merged.json", "report.html"):
        Report(command="a").save(folder / name)
    data = json.loads((folder / "data.yaml").read_text())
    (folder / "four.yaml").write_text(json.dumps({**data, "names": ["a", "b", "c", "d"]}))
    (folder / "runs/exp/report.json").write_text(json.dumps(data))
    bad = {**data, "path": str(folder / "bad"), "train": "images", "val": "images"}
    (folder / "bad.yaml").write_text(json.dumps(bad))
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(("program", "words", "named"), CASES, ids=[f"{p.split('/')[-1]} {w}" for p, w, _ in CASES])
def test_a_refusal_is_one_line(program, words, named, folder, start, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("models.quantize.checkpoint.kind", lambda file: "quantized" if file.name[0] == "q" else "float")
    stand_in(monkeypatch)
    before = contents(folder)
    code, _, errors = start(program, *words.split())
    assert (code, len(errors)) == (2, 1), errors
    assert errors[0].startswith("error: ")
    assert named in errors[0]
    assert contents(folder) == before
