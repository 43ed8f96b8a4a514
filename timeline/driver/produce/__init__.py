"""How puts and mutations travel to a broker."""
