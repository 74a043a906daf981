"""What everything stands on. Nothing here communicates, or imports anything of weft from above."""
