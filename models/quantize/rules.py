"""THE table: upstream module class → how its tensors flow, and so what is quantized and what shares a scale.

A row says how a class computes its output, in statements that read like its forward pass:

    Rule("RepNCSPELAN4", "flow", "why", "y = cv1(x); a, b = chunk(y, 2); ...; out = cv4(z)")

`x` is the module's input (a list when the layer reads several), `out` its result. A name that is one of `OPS` is an
operation on tensors; every other name is a submodule (`cv1`, `cv2[0]`, `self[0]`). The same statements are read twice:
`flow.read` interprets them with symbols, from which `placement.py` derives the placement, and `modules.FlowModule` runs
them on tensors.

What follows from the kind of an operation, and needs no further row
("Explicit Quantization", TensorRT developer guide):

* `conv`     its input is INT8 (per tensor), its weight is INT8 (per output channel); its output is not quantized for
             its own sake, so that the activation behind it fuses.
* `move`     Concat, Split, MaxPool, nearest Resize only move values: when the result is read as INT8, inputs and
             outputs are INT8 with ONE scale, and the operation runs in INT8 or vanishes.
* `average`  an average pool, operation or leaf, has no weights: with an INT8 result it needs an INT8 input, each with a
             scale of its own.
* `add`      with an INT8 result its inputs are INT8, each with a scale of its own: the residual, and also the branch
             that comes from a convolution, because SiLU stands between the two and TensorRT fuses no Add behind it.
             With the recipe's `add: residual` that branch stays float.
* `float`    computed in float; nothing is asked of its inputs. Between quantized tensors `--verify` calls it an island.

The image is a tensor like any other: whatever reads it as INT8 quantizes it first.

docs/placement.md holds what each choice brought on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["conv", "move", "average", "add", "float"]
Flow = str  # statements, between semicolons

# operation in a flow → what it means for quantization (its computation: flow.OPERATIONS)
OPS: dict[str, Kind] = {
    "chunk": "move", "split": "move", "concat": "move", "identity": "move", "max_pool": "move", "resize_like": "move",
    "avg_pool": "average", "add": "add", "sum": "add",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Description of the computation of one upstream class.

    A leaf is `conv`, `move`, `average` or `float`; a `flow` is described by statements, and a `head`'s convolutions are
    while upstream's own forward (decoding) keeps running.
    """

    name: str  # of the class in upstream's models.common or models.yolo, or in torch.nn
    kind: Literal["conv", "move", "average", "float", "flow", "head"]
    why: str
    flow: Flow | Callable[[Any], Flow] = ""  # or a function of the module, where its shape depends on the instance

    def statements(self, module: nn.Module) -> Flow:
        """The statements that hold for this instance."""
        if callable(self.flow):
            return self.flow(module)
        return self.flow


def _sequence(module: Sequence[Any]) -> Flow:
    if not len(module):
        return "out = identity(x)"
    names = ["x", *(f"y{index}" for index in range(len(module) - 1)), "out"]
    statements = [f"{names[i + 1]} = self[{i}]({names[i]})" for i in range(len(module))]
    return "; ".join(statements)


def _bottleneck(module: Any) -> Flow:
    if module.add:
        return "y = cv1(x); z = cv2(y); out = add(x, z)"
    return "y = cv1(x); out = cv2(y)"


def _levels(module: Any, branches: dict[str, str]) -> Flow:
    """Each branch of a head on each level."""
    statements = []
    for name, convolutions in branches.items():
        for level in range(module.nl):
            statements.append(f"{name}{level} = {convolutions}[{level}](x[{level}])")
    return "; ".join(statements)


def _detect(module: Any) -> Flow:
    return _levels(module, {"box": "cv2", "cls": "cv3"})


def _segment(module: Any, source: int = 0) -> Flow:
    return f"{_levels(module, {'box': 'cv2', 'cls': 'cv3', 'mask': 'cv4'})}; masks = proto(x[{source}])"


def _dsegment(module: Any) -> Flow:
    return _segment(module, module.nl)


def _pools(module: Any, source: str) -> Flow:
    """Pools of one tensor side by side, joined with it to `z`."""
    names = [f"p{index}" for index in range(len(module.m))]
    statements = [f"{name} = m[{index}]({source})" for index, name in enumerate(names)]
    statements.append(f"z = concat({', '.join([source, *names])})")
    return "; ".join(statements)


def _spp(module: Any) -> Flow:
    return f"a = cv1(x); {_pools(module, 'a')}; out = cv2(z)"


def _sppcspc(module: Any) -> Flow:
    longer = f"a = cv1(x); b = cv3(a); c = cv4(b); {_pools(module, 'c')}; d = cv5(z); e = cv6(d)"
    return f"{longer}; g = cv2(x); w = concat(e, g); out = cv7(w)"


def _fuse(module: Any) -> Flow:
    last = len(module.f) - 1  # every input but the last is a CBLinear's list
    names = [f"r{index}" for index in range(last)]
    statements = []
    for index, name in enumerate(names):
        statements.append(f"{name} = resize_like(x[{index}][{module.idx[index]}], x[{last}])")
    statements.append(f"out = sum({', '.join(names)}, x[{last}])")
    return "; ".join(statements)


_CSP = "a = cv1(x); b = m(a); c = cv2(x); z = concat(b, c); out = cv3(z)"
# not concat(a, b, c, d): y is one tensor with one scale; see separate_parts.py
_ELAN = "y = cv1(x); a, b = chunk(y, 2); c = cv2(b); d = cv3(c); z = concat(y, c, d); out = cv4(z)"
_POOL = "p = avg_pool(x, 2, 1, 0, False, True)"

RULES: tuple[Rule, ...] = (
    # --- leaves ------------------------------------------------------------------------------------------------------
    Rule("Conv", "conv", "convolution, folded batch norm and activation: one fused INT8 kernel"),
    Rule("DWConv", "conv", "a depthwise Conv"),
    Rule("RepConvN", "conv", "its branches are folded into one convolution before placement"),
    Rule("Conv2d", "conv", "a convolution without activation, as at the end of the head"),
    Rule("MaxPool2d", "move", "the maximum commutes with rounding: INT8 in, INT8 out, same scale"),
    Rule("Upsample", "move", "nearest neighbour repeats values"),
    Rule("Identity", "move", "nothing happens to the values"),
    Rule("ZeroPad2d", "float", "TensorRT pads in float"),
    Rule("DFL", "float", "softmax over 16 bins and a fixed sum: part of the decoding, which needs its precision"),
    # --- containers --------------------------------------------------------------------------------------------------
    Rule("Sequential", "flow", "one after another", _sequence),
    Rule("Concat", "flow", "all inputs and the result share one scale", "out = concat(*x, dim=self.d)"),
    Rule("Silence", "flow", "passes its input on", "out = identity(x)"),
    # --- blocks ------------------------------------------------------------------------------------------------------
    Rule("RepNBottleneck", "flow", "the shortcut is the residual input of an Add", _bottleneck),
    Rule("Bottleneck", "flow", "as RepNBottleneck", _bottleneck),
    Rule("RepNCSP", "flow", "two branches meet in a Concat, so their ends share a scale", _CSP),
    Rule("RepNCSPELAN4", "flow", "all between cv1 and cv4 shares one scale: nothing is requantized inside", _ELAN),
    Rule("ELAN1", "flow", "as RepNCSPELAN4, with plain convolutions inside", _ELAN),
    Rule("SP", "flow", "a MaxPool in a module of its own", "out = m(x)"),
    Rule("MP", "flow", "as SP", "out = m(x)"),
    Rule("SPP", "flow", "the MaxPools and their Concat share the scale of cv1's result", _spp),
    Rule("SPPCSPC", "flow", "as SPP, in the longer of two branches", _sppcspc),
    Rule("SPPELAN", "flow", "three MaxPools in a row and their Concat share the scale of cv1's result",
         "a = cv1(x); b = cv2(a); c = cv3(b); d = cv4(c); z = concat(a, b, c, d); out = cv5(z)"),
    Rule("SPPF", "flow", "as SPPELAN, with one MaxPool used three times",
         "a = cv1(x); b = m(a); c = m(b); d = m(c); z = concat(a, b, c, d); out = cv2(z)"),
    Rule("AConv", "flow", "the average pool stands between two quantized tensors and runs in INT8",
         f"{_POOL}; out = cv1(p)"),
    Rule("ADown", "flow", "as AConv; the split and the MaxPool behind the average pool share its result's scale",
         f"{_POOL}; a, b = chunk(p, 2); u = cv1(a); v = max_pool(b, 3, 2, 1); w = cv2(v); out = concat(u, w)"),
    Rule("CBLinear", "flow", "a convolution's result in parts, for several CBFuse: the parts share its scale",
         "y = conv(x); out = split(y, self.c2s)"),
    Rule("CBFuse", "flow", "adds up what CBLinear split, enlarged: every summand is INT8", _fuse),
    Rule("Proto", "flow", "convolutions around a nearest Upsample",
         "a = cv1(x); b = upsample(a); c = cv2(b); out = cv3(c)"),
    # --- heads -------------------------------------------------------------------------------------------------------
    Rule("DDetect", "head", "its convolutions are quantized as the recipe's `head` says; the decoding stays float",
         _detect),
    Rule("Detect", "head", "as DDetect", _detect),
    Rule("Segment", "head", "as Detect, with the convolutions of mask coefficients and prototypes", _segment),
    Rule("DSegment", "head", "as Segment; its prototypes come from an input of their own", _dsegment),
)  # fmt: skip

_INTERPOLATION = Rule("Upsample", "float", "other modes than nearest compute new values")
_BY_NAME = {rule.name: rule for rule in RULES}


def find(module: nn.Module) -> Rule | None:
    """Find the row for a module, by its exact class: a user's subclass may compute something else."""
    cls = type(module)
    upstream = cls.__module__.removeprefix("yolov9.").startswith(("models.", "torch.nn."))
    if cls.__name__ == "Upsample" and getattr(module, "mode", "nearest") != "nearest":
        return _INTERPOLATION
    return _BY_NAME.get(cls.__name__) if upstream else None
