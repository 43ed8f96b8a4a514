"""A broker among others: hints to peers, and who joined or left."""
