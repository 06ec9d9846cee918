"""Every entry of the lists of allowed names, called with strings that would leave a mark: none does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hostile_canary import watched

from utils.untrusted import allowed_names

BEFORE = (
    "from utils import upstream, upstream_import\nupstream_import.ensure()\n"
    "import models.common, models.yolo, torch\nfrom torch import nn"
)

TRY = """
import contextlib
from utils.untrusted import allowed_names, pickled_values
from utils.untrusted.pickle_machine import Damaged, NotAllowed

MARKS = [
    "mark", "touch mark", "mark.pt", "mark.yaml", "http://127.0.0.1:9/mark.pt", "https://127.0.0.1:9/mark.onnx",
    "__import__('os').system('touch mark')", "mark.onnx", "mark.engine", "grpc://127.0.0.1:9", "|touch mark",
    b"touch mark",
]
tried, made = 0, []

def call(function, kinds):
    global tried
    for count in range(8):
        for index in range(0, len(MARKS), 1 + count % 3):
            words = [MARKS[(index + step) % len(MARKS)] for step in range(count)]
            for arguments in (words, [8, 8, *words][:8], [words], [[8, 8], *words]):
                tried += 1
                with contextlib.suppress(*kinds):
                    made.append(function(*arguments))
"""

MODULES = """
ours = vars(models.yolo)
classes = set(upstream.module_classes().values())
classes |= {eval(name, {"nn": nn}, ours) for name in allowed_names.LAYERS}
for cls in classes:
    call(cls, [Exception])
    call(cls.__new__, [Exception])
print(len(classes), tried)
"""

VALUES = """
values = pickled_values.Values(upstream.module_classes(), lambda *_: torch.UntypedStorage(4))
values._count = lambda work: None
names = [*upstream.module_classes(), *allowed_names.FUNCTIONS, *allowed_names.STORAGES, *allowed_names.INERT]
names += [f"torch.{name}" for name in allowed_names.DTYPES]
for name in names:
    found = values.find(name)
    call(lambda *arguments: values.call(found, arguments), [NotAllowed, Damaged])
    if isinstance(found, pickled_values.ModuleClass):
        assert vars(values.create(found)) == {}
for function in pickled_values.MAKERS.values():
    call(function, [Exception])
kinds = {type(one) for one in made}
print(len(names), tried, sorted(kind.__name__ for kind in kinds))
"""

ACTIVATIONS = """
for text in [*allowed_names.ACTIVATIONS]:
    assert isinstance(eval(text, {"nn": nn}), nn.Module)
for word in allowed_names.WORDS - {"nc", "anchors", "None"}:
    assert word not in vars(models.yolo) and word not in dir(__builtins__), word
"""

CONTROL = """
with contextlib.suppress(Exception):
    models.common.DetectMultiBackend("http://127.0.0.1:9/mark.pt")
"""


@pytest.mark.parametrize("code", [MODULES, VALUES, ACTIVATIONS], ids=["modules", "values", "words"])
def test_no_entry_leaves_a_mark(code, tmp_path: Path, checkout: Path):
    found = _watched(code, tmp_path, checkout)
    assert found.returncode == 0, found.err[-2000:]
    assert found.events == []
    assert list((tmp_path / "here").iterdir()) == []


def test_the_class_that_the_issue_names_would_have(tmp_path: Path, checkout: Path):
    assert _watched(CONTROL, tmp_path, checkout).events
    assert not any("DetectMultiBackend" in names for names in allowed_names.UPSTREAM_MODULES.values())


def test_getattr_gives_of_all_classes_what_a_segment_head_keeps_and_nothing_else():
    from random_networks import tiny_with

    from utils import upstream
    from utils.untrusted.pickle_machine import NotAllowed
    from utils.untrusted.pickled_values import Values

    classes = upstream.module_classes()
    for head, below in allowed_names.KEPT_FORWARDS.items():
        made = upstream.build_model(tiny_with(head)).model[-1]
        kept = [key for key, value in vars(made).items() if callable(value)]
        assert kept == [allowed_names.KEPT_AS]
        assert made.detect is vars(classes[f"models.yolo.{below}"])["forward"]
    values = Values(classes, None)
    function = values.find("builtins.getattr")
    given, tried = set(), 0
    for place, cls in classes.items():
        for name in (*dir(cls), "mro", "__name__", "__subclasses__"):
            tried += 1
            try:
                found = values.call(function, (values.find(place), name))
            except NotAllowed:
                continue
            assert found is cls.forward
            given.add((place.removeprefix("yolov9.").removeprefix("yolo9."), name))
    assert given == {(f"models.yolo.{name}", "forward") for name in ("Detect", "DDetect", "DualDDetect")}
    assert tried > 1000


def _watched(code: str, tmp_path: Path, checkout: Path):
    (tmp_path / "here").mkdir()
    before = f"{BEFORE}\nimport os\nos.chdir({str(tmp_path / 'here')!r})"
    return watched(TRY + code, tmp_path / "report", before=before, cwd=checkout, timeout=280)


def test_the_lists_cover_what_upstreams_networks_are_made_of(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    import yaml

    from utils import upstream, upstream_description

    files = [path for path in checkout.glob("models/*/*.yaml") if "backbone" in yaml.safe_load(path.read_text())]
    for path in files:
        upstream_description.check(yaml.safe_load(path.read_text()))
    classes = set(upstream.module_classes().values())
    assert {
        type(module) for module in upstream.build_model(checkout / "data/demo/gelan-digits.yaml").modules()
    } <= classes
    from models.common import Conv, RepConvN
    from models.yolo import parse_model

    for layer in (Conv, RepConvN):  # upstream sets it to what the last YAML with an `activation` says, ReLU here
        monkeypatch.setattr(layer, "default_act", layer.default_act)
    for path in files:
        if path.parent.name != "hub":  # upstream's own code cannot build these
            with torch.device("meta"):  # layers without numbers in them
                layers, _ = parse_model(upstream.read_description(path), [3])
            assert {type(module) for module in layers.modules()} <= classes, path
