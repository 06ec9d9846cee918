"""What INT8 costs networks of real size: trained, quantized, exported, built, evaluated and timed; one page says it.

`scripts/accuracy.py` runs it. Each step is a program of its own, and one whose result is there is not run again.

networks.py   the networks, and how long each is trained     steps.py     a step: its command, its result, its log
train.py      upstream's train_dual.py, then reparameterization
measure.py    float checkpoint → quantized, exported, built, timed, evaluated
results.py    what the steps left                            tables.py    tables and the plot
page.py       the page that can be shared                    run.py       the job
"""
