"""The engine's side of speculation: verifies drafts in a step, and measures what that costs."""
