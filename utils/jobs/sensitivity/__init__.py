"""`qat.py sensitive`: the parts of a network that lose AP in INT8, and a recipe that keeps them in FP16.

run.py     the job: calibrate, search, place the recipe again, report
units.py   the parts that are tried, and their costs
search.py  chooses units: by distances to the FP32 model's predictions, then by AP, adding one at a time
"""
