"""Everything that is done to an ONNX graph.

view.py                who produces a tensor, who consumes it, what is constant; and what passes edit a graph with
qdq_view.py            what is quantized how, what the recipe leaves in float, and where quantizers come from, after
                       passes that cut and widen tensors
export_config.py       settings of an export: image size, axes, typing, operator set
export.py              torch network → ONNX file: tracing, the passes, checks, metadata
passes/                what becomes of the traced graph: a list of passes, each with its reason
output_formats.py      what stands behind the raw predictions: NMS, masks, DeepStream's rows; deepstream.py: what
                       DeepStream wants beside a network
verify.py              does a Q/DQ graph have the properties that TensorRT turns into speed? These are data

Passes are pure: ModelProto in, ModelProto out, no files.
"""
