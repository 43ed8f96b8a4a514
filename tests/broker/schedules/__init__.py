"""Recurring schedules at brokers."""
