"""What a broker reports about itself: lateness and its causes, counts, consumers."""
