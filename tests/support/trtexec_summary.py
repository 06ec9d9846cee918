"""What trtexec prints after timing an engine."""

# The form of the summary that trtexec 8.6 to 10 prints
SUMMARY = """\
[11/21/2026-06:00:00] [I] === Performance summary ===
[11/21/2026-06:00:00] [I] Throughput: 220.105 qps
[11/21/2026-06:00:00] [I] Latency: min = 4.51 ms, max = 5.25 ms, mean = 4.6 ms, median = 4.55 ms, percentile(90%) = \
4.7 ms, percentile(95%) = 4.8 ms, percentile(99%) = 5.1 ms
[11/21/2026-06:00:00] [I] Enqueue Time: min = 0.01 ms, max = 0.2 ms, mean = 0.02 ms, median = 0.015 ms, \
percentile(90%) = 0.03 ms, percentile(95%) = 0.04 ms, percentile(99%) = 0.1 ms
[11/21/2026-06:00:00] [I] GPU Compute Time: min = 4.4 ms, max = 5.15 ms, mean = 4.5 ms, median = 4.45 ms, \
percentile(90%) = 4.6 ms, percentile(95%) = 4.7 ms, percentile(99%) = 5 ms
[11/21/2026-06:00:00] [I] Total Host Walltime: 3.01 s
"""
