"""Benchmarks that a user runs: our ways of decoding beside other libraries', and a step's profile.

    shapes          model shapes by name, with random weights (`random_weights`)
    floor           bytes a token must read, over the bandwidth that this machine shows
    contest         who takes part: our ways (`ways`) and the libraries installed here (`peers`)
    options         what is asked for, and the points at which it is measured
    decode          all contestants in turns, point by point; `prompts` beside it
    profile         one step's graph, launch by launch
    report, plot    tables, result files, pictures

Every number is the median of several rounds in which all contestants take turns; what could not be
measured is named with its reason.
"""
