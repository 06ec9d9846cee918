"""The ground: what everything else stands on. Nothing here imports anything of ours.

errors.py        typed errors that say the fix; what 1.0 had and 2.0 has not
text.py          values in messages, and tables as text and Markdown
files.py         reading and writing: regular files, whole or not at all, YAML, JSON and ONNX; hashes; run folders
run_folder.py    a run folder belongs to one program while that lives
checkpoints.py   the one reader of PyTorch files; no code of theirs is run
strict_model.py  pydantic models of what people write and programs store, with errors of one line
options.py       command-line options, declared once
logging.py       the log: plain lines, and how much a part of the program says
distributed.py   several processes that work on one job
cpu.py           how many CPU cores this process may use, and what libraries are told of it
device.py        the device that networks run on, and in which precision
tasks.py         what differs between detection and other tasks: outputs, their rows, confidence and NMS IoU
input_spec.py    in which form a network takes images
weights.py       which FP32 weights a file was made from, and how many bytes its weights take
curves.py        precision, recall and F1 as curves, and a confusion matrix, as plain values
typing_policy.py weakly and strongly typed files, and which one a TensorRT version wants
output_form.py   in which form a network gives results: raw predictions, detections, DeepStream's rows; masks
split_counts.py  how many images, objects and oddities a split of a dataset holds
score.py         AP of boxes and masks, what networks are compared by, standard errors of AP and its differences
"""
