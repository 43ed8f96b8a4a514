"""The jobs around the data source: load, backup, restore, forecast, audit and compact, and their trials."""
