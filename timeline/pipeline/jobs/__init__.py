"""The jobs around the data source, and their trials."""
