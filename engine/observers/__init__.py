"""What watches the engine's steps: recordings of the schedule, and receipts."""
