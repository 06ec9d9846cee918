"""Jobs that users ask for, a file each; the only place where the libraries meet. Programs call these.

options.py   the options of qat.py and val_trt.py, one declaration each; export_options.py: those of both exporters
inputs.py    everything that a run works on, checked before it writes
run_state.py the state from which a killed run continues, and what is compared then
open.py      a file → runner; needed libraries

quantize.py           FP32 → PTQ → QAT → the best         calibrate.py        AP of each calibration method
evaluate.py           AP of a network, a row of reports   visualize.py        detections on images, for reports
draw.py               detections drawn, read ahead      sources.py          images and videos of --source
export.py             checkpoint → checked ONNX files     compare_outputs.py  ONNX Runtime beside PyTorch
compare_tensors.py    the same between quantizers         check_engine.py     TensorRT beside ONNX Runtime
time_files.py         benchmark_trt.py: options, checks, results; benchmark.py times
build_engine.py       an ONNX file as an engine             report.py           results of runs on one page
environment.py        what a bug report needs
benchmark.py          engines and ONNX files, timed       model_repository.py Triton's: written, checked
advice.py             the verdict, and what comes next    commands.py         commands that users are offered
judgement.py          the rule for a loss                 sensitivity/        layers that lose AP in INT8
openvino_layers.py    layers and times in OpenVINO        cpu_speed.py        INT8 on this CPU, without weights
pipeline/             programs as resumable steps: quickstart.sh, val_trt.sh, benchmarks/accuracy.py
"""
