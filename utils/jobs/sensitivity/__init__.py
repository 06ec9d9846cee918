"""`qat.py sensitive`: which parts of a network hurt in INT8, and a recipe that keeps them in float.

run.py     the job: calibrate, search, place the recipe anew, report
units.py   the parts that it asks about, and what they cost
search.py  from units to a choice of them: distances to the float network's predictions, AP, greedy addition
"""
