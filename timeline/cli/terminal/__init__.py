"""What a terminal shows: tables, JSON, progress, receipts."""
