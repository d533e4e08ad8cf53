"""The benchmarks of `ostinato bench`: our ways of decoding, and a profile of one step.

    shapes          model shapes by name, for random weights (`random_weights`)
    floor           this machine's memory bandwidth, measured
    ways            the interface of contestants in a comparison, and our ways of decoding
    options         the options of a comparison, and the points at which it measures
    decode          measures all contestants in turns, point by point, prompts too
    profile         measures the graph of one step, launch by launch
    report, plot    tables, result files, pictures

Every number is the median of several rounds in which all contestants take turns.  A result lists
the contestants that could not be measured, with the reason.  `benchmarks/decode.py` compares other
libraries with ours.
"""
