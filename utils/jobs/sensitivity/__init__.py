"""`qat.py sensitive`: which parts of a network hurt in INT8, and a recipe that keeps them in float.

run.py        the job: screening → AP of what matters → recipe
state.py      its files, and the state from which a killed run continues
units.py      the parts it asks about
screening.py  the passes over images that score units; confirming.py: the one that gives AP of states
search.py     from units to a choice; selection.py: its arithmetic
report.py     the summary, the chart and the recipe's file
"""
