"""What can be done with the cells of a grid: one file per kind of study.

A study is a function `run(cells, store, *, axes, config, ...)` that returns what the console shows.
"""
