"""Bad inputs: the exit code, one line on standard error, and the option, key or file that the line names."""

import shutil
from pathlib import Path

import pytest
import torch
from forms import lively
from one_conv import write_onnx
from qat_runs import write_small_set
from random_networks import TINY, random_network, save_float, save_quantized

from utils import upstream
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images

Q, S, C, E = ("qat.py quantize", "qat.py sensitive", "qat.py calibrate", "qat.py eval")
X, DS, V, R = ("export_qat.py", "export_yoloV9.py", "val_trt.py", "reparameterization.py")
B, M, U = (f"scripts/{name}.py" for name in ("build_engine", "make_report", "run_upstream"))
FEW = "--weights float.pt --data data.yaml --imgsz 64 --workers 0 --device cpu"
CASES = [  # program, arguments, what the line names
    (Q, "--weights missing.pt --data data.yaml", "missing.pt"),
    (Q, "--weights empty.pt --data data.yaml", "empty.pt"),
    (Q, "--weights cut.pt --data data.yaml", "cut.pt"),
    (Q, "--weights flipped.pt --data data.yaml", "flipped.pt"),
    (Q, "--weights int8.pt --data data.yaml", "int8.pt"),
    (Q, "--weights list.pt --data data.yaml", "list.pt"),
    (Q, "--data data.yaml", "--weights"),
    (Q, f"{FEW} --imgsz 0", "--imgsz"),
    (Q, f"{FEW} --lr nan", "--lr"),
    (Q, f"{FEW} --device 7", "--device"),
    (Q, f"{FEW} --data missing.yaml", "missing.yaml"),
    (Q, f"{FEW} --data broken.yaml", "broken.yaml"),
    (Q, f"{FEW} --data three.yaml", "three.yaml"),
    (Q, f"{FEW} --recipe unknown-key.yaml", "finetune"),
    (Q, f"{FEW} --recipe pattern.yaml", "model.77"),
    (Q, f"{FEW} --recipe all-float.yaml", "float"),
    (Q, f"{FEW} --hyp broken.yaml", "broken.yaml"),
    (Q, f"{FEW} --hyp missing.yaml", "--hyp missing.yaml"),
    (Q, f"{FEW} --imgsz 64 96 --hyp hyp.yaml", "--hyp"),
    (Q, f"{FEW} --weights dual.pt", "python reparameterization.py --weights"),
    (Q, f"{FEW} --data untrained.yaml", "no 'train:' entry"),
    (Q, f"{FEW} --hyp lr0.yaml", "mosaic"),
    (Q, f"{FEW} --data bare.yaml", "give --unlabelled"),
    (Q, f"{FEW} --data bare.yaml --no-eval-origin --no-eval-ptq", "no image of 'val' has a label file"),
    (Q, f"{FEW} --data bare.yaml --ptq-only --no-eval-ptq", "no image of 'val' has a label file"),
    (E, f"{FEW} --data bare.yaml --unlabelled", "float.pt does not name it; give both: python val_trt.py"),
    (E, f"{FEW} --weights int8.pt --data three.yaml", "detects 10 classes"),
    *((E, f"{FEW} --data {kind}.yaml --save-json", kind) for kind in ("undecodable", "wrong-label", "no-image")),
    (Q, f"{FEW} --groups nowhere.txt", "--groups nowhere.txt gives no group to"),
    (Q, f"{FEW} --calib-method max --percentile 99", "with --calib-method max"),
    (Q, "--resume missing-run", "missing-run"),
    (Q, f"{FEW} --project text.pt", "text.pt"),
    (S, f"{FEW} --granularity quantizer", "--granularity"),
    (S, f"{FEW} --weights int8.pt", "int8.pt"),
    (C, f"{FEW} --weights int8.pt", "int8.pt"),
    (X, "", "--weights"),
    (X, "--weights int8.pt --typing weak --opset 19", "--opset"),
    (X, "--weights float.pt --input-layout nhwc", "--input uint8"),
    (X, "--weights float.pt --output float.pt", "--output"),
    (X, "--weights int8.pt --half --typing weak", "--half"),
    (X, "--weights int8.pt --typing strong --opset 17", "--opset"),
    (X, "--weights float.pt --int8-weights", "--int8-weights"),
    (X, "--weights float.pt --no-int8-rewrites --half", "--no-int8-rewrites"),
    (X, "--weights float.pt --data three.yaml", "detects 10 classes"),
    (X, "--weights float.pt --output file.engine", "file.engine"),
    (X, "--weights float.pt --include onnx_end2end --sampling-ratio 0", "--sampling-ratio does nothing to a detector"),
    (X, "--weights int8.pt --input-layout nhwc", "--input uint8"),
    (X, "--verify float.onnx", "nothing to verify"),
    (X, "--verify missing.onnx", "missing.onnx"),
    (DS, "--weights float.pt --dynamic --batch 4", "--batch"),
    (DS, "--weights float.pt --nms onnx", "--nms does nothing to a detector"),
    (V, "--engine-file text.onnx --data data.yaml", "ONNX Runtime"),
    (R, "--weights float.pt --save float.pt", "float.pt"),
    (U, "val.py --weights int8.pt --data data.yaml --device cpu", "int8.pt"),
    (B, "missing.onnx", "missing.onnx"),
    (M, "missing-run", "missing-run"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    """Small good files, and bad ones made from them."""
    folder = tmp_path_factory.mktemp("bad")
    data = write_small_set(folder / "set", demo_data, train=2, val=2).read_text()
    weights = save_float(folder / "float.pt", lively(random_network(TINY)))
    save_quantized(folder / "int8.pt", weights)
    write_onnx(folder / "float.onnx")
    sources, *_ = TINY["head"][-1]
    dual = {**TINY, "head": [*TINY["head"][:-1], [[*sources, *sources], 1, "DualDDetect", ["nc"]]]}
    torch.save({"model": upstream.build_model(dual), "ema": None}, folder / "dual.pt")
    (folder / "bare").mkdir()
    for image in find_images(load_data(demo_data).paths("val"))[:2]:
        shutil.copy(image, folder / "bare")
    suffix, whole = Path(image).suffix, Path(image).read_bytes()
    kinds = {"undecodable": whole[: len(whole) // 4], "wrong-label": whole, "no-image": b"none"}
    for kind, content in kinds.items():
        for place in ("images", "labels"):
            (folder / kind / place).mkdir(parents=True)
        (folder / kind / "images" / f"a{suffix}").write_bytes(content)
        (folder / kind / "labels/a.txt").write_text(f"{99 if kind == 'wrong-label' else 0} 0.5 0.5 0.1 0.1")
    raw, middle = weights.read_bytes(), weights.stat().st_size // 2
    (folder / "cut.pt").write_bytes(raw[:middle])
    (folder / "flipped.pt").write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
    (folder / "empty.pt").touch()
    torch.save([1, 2], folder / "list.pt")
    for name in ("text.pt", "text.onnx"):
        (folder / name).write_text("these are words\n")
    texts = {
        "data": data,
        "broken": "a: [1, 2",
        "bare": f"path: {folder}\ntrain: bare\nval: bare\nnames: {list(map(str, range(10)))}\n",
        "untrained": "\n".join(line for line in data.splitlines() if not line.startswith("train")),
        **{kind: f"path: {folder / kind}\nval: images\nnames: {list(map(str, range(10)))}\n" for kind in kinds},
        "lr0": "lr0: 0.01\n",
        "hyp": Path("data/hyps/hyp.scratch-high.yaml").read_text(),
        "three": "\n".join([*(line for line in data.splitlines() if line.startswith(("path", "train", "val"))),
                            "names: [a, b, c]"]),
        "unknown-key": "finetune: {epocs: 3}\n",
        "pattern": "float: [model.77]\n",
        "all-float": "float: ['*']\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(("program", "words", "named"), CASES, ids=[f"{p.split('/')[-1]} {w}" for p, w, _ in CASES])
def test_a_bad_input_is_named_in_one_line(program, words, named, folder, checkout, fork_server, tmp_path):
    shutil.copytree(folder, tmp_path / "here")
    program, *command = program.split()
    done = fork_server.run([checkout / program, *command, *words.split()], tmp_path / "here", timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    (line,) = lines[-1:] if program == U else lines  # upstream says first what it runs
    assert line.startswith("error: ")
    assert named in line
    assert not list((tmp_path / "here").glob("runs/*/*"))
