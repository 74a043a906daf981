"""`weft demo`: sparse gradients of a real training job summed by weft, beside PyTorch's ways.

Reads text (`text`), trains word vectors on several processes with each way to sum the gradients
(`train`), shows it live (`live`), checks that the ways agree (`figures`), and writes one page
(`report`). `command` is what the command line calls; rich and matplotlib, the extra `demo`, are
imported when it runs.
"""
