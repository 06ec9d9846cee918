"""The ground: what everything else stands on. Nothing here imports anything of ours.

errors.py           typed errors that say the fix
files.py            files that appear whole or not at all, hashes, run folders, where a program may write
run_folder.py       a run folder belongs to one program while that lives
input_files.py      files that a user names: regular ones of a sensible size; YAML and JSON
onnx_files.py       the one reader of ONNX files, and how they are typed for a TensorRT
checkpoints.py      the one reader of PyTorch files; no code of theirs is run
strict_model.py     pydantic models of what people write and programs store, with errors of one line
removed.py          THE table of what 1.0 had and 2.0 has not, with what to use instead
shown.py            a value in a message
options.py          command-line options, declared once
light_torchvision.py  torchvision without torch's compiler
log_levels.py       how much a part of the program says
distributed.py      several processes that work on one job
device.py           the device that networks run on, and in which precision
tasks.py            what differs between detection and other tasks: outputs, their rows, confidence and NMS IoU
input_spec.py       in which form a network takes images
number_types.py     the integers that quantizers round to
module_patterns.py  the one matcher of module patterns
score.py            AP of boxes and masks, what networks are compared by, standard errors of AP and its differences
text_tables.py      the one renderer of tables
"""
