"""How a call begins: its one exchange, in which all ranks learn what each was asked to do."""
