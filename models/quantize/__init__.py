"""INT8 quantization of YOLOv9: placing quantizers, calibrating, training, saving. Pure torch, no foreign file formats.

A map of this package, in the order of the work:

    rules.py         THE table: upstream module class → what is quantized, what shares a scale, why
    recipe.py        what the user decides: calibration, training, what stays in float
                     recipe_fields.py: the table of what each entry may hold; recipe_fit.py: does it fit a network
    graph.py         the network as operations on tensors, read along the rules
    placement.py     plan(model, recipe) → Plan;  apply(model, plan);  describe(plan)
    modules.py       the quantized stand-ins that apply() puts in
    backend.py       the only importer of the quantizer library
    calibration.py   statistics once, then max | percentile | mse | entropy from the same pass
    sweep.py         AP of each of these methods: `qat.py calibrate`, and method auto
    finetune.py      QAT: the float network supervises the quantized one
    session.py       one run of `qat.py quantize`: float → PTQ → QAT → best, resumable
    sensitivity.py   one run of `qat.py sensitive`: what hurts in INT8 → a recipe; analysis_state.py: its files
                     units.py: the parts it asks about; layerwise.py: the network in any state, from known results
                     proxy.py: distance of predictions; screening.py: the passes over pictures;
                     search.py: from units to a choice; selection.py: its arithmetic
    options.py       what its command line can say; inputs.py: what it works on, checked before anything is written;
                     run_state.py: its files, and the state from which a killed run continues
                     state_schema.py: what these states hold, checked before a run continues
    measure.py       evaluation of networks in PyTorch, as report rows
    checkpoint.py    recipe + state on disk; loading never runs code from the file; storage.py: nothing half written
    ranges.py        amax of every scale, for reports
    errors.py        typed errors that say the fix

    >>> from models.quantize import Recipe, apply, calibrate, plan
    >>> from utils import upstream
    >>> model = upstream.fuse(upstream.load_float("yolov9-c-converted.pt").model)
    >>> apply(model, plan(model, Recipe()))
    >>> calibrate(model, batches, Recipe().calibration)

Names are imported when they are used, so that `errors` and `recipe` cost no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Recipe": "recipe",
    "plan": "placement",
    "apply": "placement",
    "describe": "placement",
    "quantizers_off": "placement",
    "calibrate": "calibration",
    "tensor_ranges": "ranges",
    "QuantizedCheckpoint": "checkpoint",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
