"""Who is to blame, and who says so: links beside all wires, and verdicts on what is seen there."""
