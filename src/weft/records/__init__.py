"""What each call did, kept for who asks: the recorder, listeners, and what was sent."""
