"""What a run reports, as data, tables, figures and a page.

schema.py      Report, Row, Sample: what programs fill in and JSON holds
tables.py      results as text
figures.py     plots; detections.py: images with boxes
html.py        the page
files.py       reports as files, and several put together
"""
