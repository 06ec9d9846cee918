"""The ground: what everything else stands on. Nothing here imports anything of ours.

errors.py         typed errors with their remedy; options that were removed, and advice for each
text.py           values in messages, and tables as text and Markdown
files.py          reading and writing: regular files, whole or not at all, YAML, JSON and ONNX; hashes
run_folder.py     a run folder, which belongs to one program while that lives
checkpoints.py    the one reader of PyTorch files; no code of theirs is run
strict_model.py   pydantic models of what people write and programs store, with errors of one line
options.py        command-line options, declared once
logging.py        the log: plain lines, and the levels of the program's parts
distributed.py    several processes that work on one job
cpu.py            the number of CPU cores that this process may use, and settings of libraries that follow from it
device.py         the device that networks run on, and its precision
tasks.py          the tasks of networks: outputs, their rows, confidence and NMS IoU
input_spec.py     the form in which a network takes images
typing_policy.py  weakly and strongly typed files, and the one that a TensorRT version wants
output_form.py    the form of a network's outputs: raw predictions, detections, DeepStream's rows; masks
weights.py        the FP32 weights that a file was made from, and the bytes of its weights
curves.py         precision, recall and F1 as curves, and a confusion matrix, as plain values
score.py          AP of boxes and masks, the number that networks are compared by, and standard errors
split_counts.py   numbers of images, objects and oddities in a split of a dataset
"""
