"""Recurring schedules: what they say, their records, and what looks at them do."""
