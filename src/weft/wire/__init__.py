"""How bytes get from rank to rank: `interface` says what a wire promises, `tcp` is weft's own."""
