"""What each call did, kept for who asks: the calls that run, listeners, and what was sent."""
