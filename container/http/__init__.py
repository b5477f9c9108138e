"""What every route shares: bodies, errors, deadlines, metrics. Imports `schema` and `wire`."""
