"""The ground: what everything else stands on. Nothing here imports anything of ours.

errors.py   typed errors that say the fix
files.py    files that appear whole or not at all, hashes, run folders
device.py   the device that networks run on
tasks.py    what differs between detection and other tasks
number_types.py  the integers that quantizers round to
text_tables.py   the one renderer of tables
onnx_files.py    the one reader of ONNX files
"""
