"""Commands that run something, and the tokens that it accepts."""
