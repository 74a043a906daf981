"""`weft demo`: sparse gradients of a real training job summed by weft, beside PyTorch's ways.

Reads text (`text`), trains word vectors on several processes with each way to sum the gradients
(`train`), shows it live (`live`), checks that the ways agree (`figures`), and writes the vectors
and a report (`report`). `command` is what the command line calls; it imports the rest when it
runs, so that `weft --help` is quick.
"""
