"""What is seen while a run goes on: metrics, console, trackers, trace, diagnosis.

In come step reports and gauges; out go `metrics.jsonl` and its mirrors. Reading a finished run is the work of
`report`.
"""
