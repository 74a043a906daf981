"""`weft demo --graph`: a graph network trained on all of a real graph that is cut between ranks.

Reads a graph of this machine (`sources`), cuts it (`cut`), trains on several processes and then on
one alone (`train`), checks that both have the same losses, and writes a report. `run` does all of
it; what it shows and writes goes through the parts of `weft.cli.demo`.
"""
