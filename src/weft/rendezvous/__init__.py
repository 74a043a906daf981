"""How ranks find one another: who launched them, on which hosts they are, where they meet."""
