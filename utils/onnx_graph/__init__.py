"""Everything that is done to an ONNX graph.

view.py                producers and consumers of a tensor, constants; and the functions by which passes edit a graph
qdq_view.py            the quantizers of tensors, the convolutions that the recipe leaves in float, and the quantizers
                       of the network that those of the graph come from, after passes that cut and widen tensors
export_config.py       settings of an export: image size, axes, typing, operator set
export.py              torch network → ONNX file: tracing, the passes, checks, metadata
passes/                what becomes of the traced graph: a list of passes, each with its reason
output_formats.py      what stands behind the raw predictions: NMS, masks, DeepStream's rows; deepstream.py: what
                       DeepStream wants beside a network
verify.py              checks a Q/DQ graph for the properties, listed as data, that TensorRT turns into speed

Passes are pure: ModelProto in, ModelProto out, no files.
"""
