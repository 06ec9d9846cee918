"""INT8 quantization of YOLOv9 as a library: placing quantizers, calibrating, training, saving.

A map of this package, in the order of the work. The programs' jobs, which combine it with evaluation, export and
reports, are in `utils/jobs/`.

    rules.py           THE table: upstream module class → what is quantized, what shares a scale, why
    recipe.py          what the user decides: calibration, training, what stays in float
    flow.py            the statements of the rules: parsed, run on tensors, and the network read along them
    placement.py       plan(model, recipe) → Plan;  apply(model, plan);  describe(plan)
    modules.py         the quantized stand-ins that apply() puts in
    fake_quantize.py   the quantizer: amax, a switch, a scale that training can put in; its rounding and gradients
    fused_cuda.py      the same for training on CUDA in one pass each way, also with SiLU in front
    fused_kernels.py   its kernels, in Triton
    calibration.py     statistics once, then max | percentile | mse from the same pass; ranges, for reports
    finetune.py        QAT: the FP32 model supervises the quantized one; ranges as parameters, the rates
    distillation.py    what they are compared by: the task loss
    step_graph.py      a step's kernels, recorded and replayed
    checkpoint.py      recipe + state on disk; loading never runs code from the file

    >>> from models.quantize import calibration, placement
    >>> from models.quantize.recipe import Calibration, Recipe
    >>> from utils import upstream
    >>> model = upstream.fuse(upstream.load_float("yolov9-c-converted.pt").model)
    >>> placement.apply(model, placement.plan(model, Recipe()))
    >>> statistics = calibration.calibrate(model, batches, Calibration(method="mse"))  # images [B, 3, H, W] in 0..1

`finetune.Finetuner` trains it, `checkpoint.save` and `load_quantized` keep it, as in `utils/jobs/quantize.py`.
"""

__version__ = "2.0.0.dev0"
