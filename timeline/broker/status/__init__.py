"""The broker's reports about itself: lateness and its causes, counts, consumers."""
