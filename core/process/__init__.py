"""How processes are named, started, watched and told what to do, and what they log."""
