"""Everything that is done to an ONNX graph.

view.py                who produces a tensor, who consumes it, what is constant; and what passes edit a graph with
qdq_view.py            what is quantized how, and what the recipe leaves in float
export.py              torch network → ONNX file: tracing, the passes, checks, metadata; export_config.py: how
cleanup.py             passes on any graph; qdq_passes.py: on its quantizers
int8_kernels.py        passes for INT8 kernels; split_convolutions.py: a convolution for each part of a result that is
                       consumed in parts; pad_channels.py: channels in whole blocks
decoding.py            boxes from what the last convolutions give, in few steps, or of the best only
fp16.py                the pass that turns the float body of a network to FP16
input_forms.py         in which form images are taken: floats, bytes or INT8
output_formats.py      what stands behind the raw predictions: NMS, DeepStream's rows; mask_output.py: masks;
                       deepstream.py: what DeepStream wants beside a network
verify.py              does a Q/DQ graph have the properties that TensorRT turns into speed? These are data

Passes are pure: ModelProto in, ModelProto out, no files.
"""
