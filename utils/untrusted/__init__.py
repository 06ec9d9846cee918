"""PyTorch files that nobody vouches for, read without running anything of theirs.

torch_archive.py   read(file): the archive and its storages
pickle_machine.py  a pickle's instructions, those that make plain values only
pickled_values.py  the values that a pickle may make
allowed_names.py   THE lists: what a checkpoint and a model description may name
loaded_values.py   what came out, checked
"""
