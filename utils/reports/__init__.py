"""What a run reports, as data, tables, figures and a page.

schema.py      Report, Row, Sample: what programs fill in and JSON holds
machine.py     machine and libraries that results depend on
tables.py      results as text
figures.py     plots; detections.py: images with boxes and masks
html.py        the page
files.py       reports as files, and several put together
"""
