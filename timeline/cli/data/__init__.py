"""Commands that move data in and out."""
