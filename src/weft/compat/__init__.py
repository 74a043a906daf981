"""The interfaces of other libraries, under their names and with their argument order.

They call weft's own functions; no algorithm is here. A program that was written for oneCCL
(`oneccl`), DistDL (`distdl`) or SAR (`sar`) keeps its calls. A new program should call weft's own
functions.
"""
