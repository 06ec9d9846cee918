"""`qat.py sensitive`: the parts of a network that lose AP in INT8, and a recipe that keeps them in FP16.

run.py     the job: calibrate, search, place the recipe again, report
units.py   the parts that are tried, and their costs
search.py  from units to a choice of them: distances to the FP32 model's predictions, AP, greedy addition
"""
