"""Rows that compare casckpt with the speed of light of the machine at hand: `python -m benchmarks --help`.

Each row is a function in one of the files here, listed in `benchmarks/__main__.py`. It yields `Measurement`s: a paired
ratio (subject and baseline alternate in one process) or an absolute figure with a target. docs/benchmarks.md says
what each row means.
"""
