"""What a user can ask for, a file each; the only place where the libraries meet. Programs call these.

options.py   the options of qat.py and val_trt.py, one declaration each
inputs.py    what a run works on, checked before it writes
run_state.py the state from which a killed run continues  open.py       a file → runner; needed libraries

quantize.py           float → PTQ → QAT → the best        calibrate.py        AP of each calibration method
evaluate.py           AP of a checkpoint                  visualize.py        detections drawn, or for reports
export.py             checkpoint → checked ONNX files     compare_outputs.py  ONNX Runtime beside PyTorch
compare_tensors.py    the same between quantizers         check_engine.py     TensorRT beside ONNX Runtime
evaluate_file.py      AP of a file, and its report row    benchmark.py        engines, .pt and .onnx, timed
sensitivity/          which parts hurt in INT8            model_repository.py Triton's, from a file
check_repository.py   would Triton load it
"""
