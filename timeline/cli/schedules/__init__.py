"""`timeline schedule …`: recurring schedules."""
