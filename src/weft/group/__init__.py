"""Who takes part: the ranks, whose turn it is, who is alive, and who is to blame."""
